"""How bytes of weights come from a trainer's processes: who sends what, in which buckets, and who is still there."""
