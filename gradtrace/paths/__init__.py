"""Paths from the loss to elements: searched one by one, followed together, summed in ABS."""
