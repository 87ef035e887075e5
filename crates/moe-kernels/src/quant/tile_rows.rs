//! The height of a tile.

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
