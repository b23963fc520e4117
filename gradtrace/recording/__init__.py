"""From a loss to its backward program."""
