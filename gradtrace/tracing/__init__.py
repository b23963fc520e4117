"""Which way gradient came: values with the components on their paths, influence, single paths."""
