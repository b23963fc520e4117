"""Measures of components beside influence: through, mass, agreement, conflicts, choices."""
