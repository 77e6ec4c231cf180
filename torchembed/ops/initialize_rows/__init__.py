"""Initial values of rows that new ids were given."""

from torchembed.ops.initialize_rows.function import InitialValues, initialize_rows

__all__ = ["InitialValues", "initialize_rows"]
