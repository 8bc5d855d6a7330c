"""Task sets that others made, as environments; the seed picks the task. One file per kind, registered by name."""
