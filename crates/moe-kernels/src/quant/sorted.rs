//! The columns of a matrix with act-order, sorted by group, as a pack on a device holds them.

// As `tiles`, which this is a part of.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use std::ops::Range;

use candle_core::{Result, bail};

/// An entry of `perm` for a packed column that multiplies nothing.
pub(super) const NO_COLUMN: u32 = u32::MAX;

/// Whether each of `0..len` stands there once.
pub(super) fn is_order(perm: &[u32], len: usize) -> bool {
    let mut seen = vec![false; len];
    perm.len() == len
        && perm.iter().all(|&i| seen.get_mut(i as usize).is_some_and(|s| !std::mem::replace(s, true)))
}

/// The packed columns of a matrix with act-order.
#[derive(Clone, Debug)]
pub(super) struct Sorted {
    /// The logical column of each packed column; `NO_COLUMN`: none.
    pub logical: Vec<u32>,
    /// The column of x that it multiplies.
    pub x: Vec<u32>,
    /// The logical group of each packed group.
    pub groups: Vec<u32>,
}

impl Sorted {
    /// The columns of `inputs` by group of `size`, each group filled up to whole runs of `group` columns.
    pub(super) fn new(
        perm: &[u32],
        width: usize,
        inputs: &Range<usize>,
        size: usize,
        group: usize,
    ) -> Result<Self> {
        if !is_order(perm, width) {
            bail!("the order of columns must name each of the {width} columns once")
        }
        let mut logical = Vec::new();
        let mut x = Vec::new();
        let mut groups = Vec::new();
        for (g, columns) in perm.chunks(size).enumerate() {
            for (i, &column) in columns.iter().enumerate() {
                if inputs.contains(&(column as usize)) {
                    logical.push((g * size + i) as u32);
                    x.push(column - inputs.start as u32);
                }
            }
            let filled = logical.len().next_multiple_of(group);
            logical.resize(filled, NO_COLUMN);
            x.resize(filled, NO_COLUMN);
            groups.resize(filled / group, g as u32);
        }
        Ok(Self { logical, x, groups })
    }
}
