"""Rows in 8 bits an element, with a scale for each row."""

from torchembed.ops.row_codec.function import decode_rows, encode_rows

__all__ = ["decode_rows", "encode_rows"]
