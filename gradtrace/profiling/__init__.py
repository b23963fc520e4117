"""Whether the time or the memory of a loop creeps up."""
