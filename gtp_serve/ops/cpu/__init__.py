"""Native CPU ops: a C++ library that works on parameters as they lie, its threads, and recorded steps."""
