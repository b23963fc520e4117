"""What a Monitor writes, step by step, and how it is read."""
