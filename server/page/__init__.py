"""The built-in page: two HTML files without a foreign byte, and the JSON that they draw."""
