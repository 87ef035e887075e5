//! Which slices of a model's tensors a rank holds.
//!
//! Column-parallel weights are cut into equal parts. Row-parallel products (o_proj, w2, down_proj) are added up in a
//! fixed number of segments of their full K ([`row_parallel_segments`]). The number does not depend on tp, so any tp
//! gives the bits of one rank; therefore a rank must hold whole segments. If there are fewer KV heads than tp, they are
//! replicated (the rule of vLLM and InfiniLM).

use std::ops::Range;

use moe_kernels::row_parallel_segments;

use crate::error::{GeometryError, refuse};
use crate::geometry::Geometry;
use crate::placement::partition;

/// This rank's part of the reduced dimension of a row-parallel product.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowShard {
    /// The full reduced size K.
    pub size: usize,
    /// Segments S of the full K.
    pub segments: usize,
    /// The indices of the segments that this rank computes.
    pub local_segments: Range<usize>,
    /// The range of elements of K that this rank computes.
    pub range: Range<usize>,
}

/// This rank's attention heads.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeadShard {
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads: the ones to which this rank's query heads attend.
    pub kv_heads: Range<usize>,
    /// Ranks that hold the same KV heads.
    pub kv_replicas: usize,
}

impl Geometry {
    /// This rank's part of the reduced size of a row-parallel product over tp (o_proj, or the down_proj of a dense or
    /// shared expert). `what` names the size in the error.
    pub fn row_shard(&self, what: &'static str, size: usize) -> Result<RowShard, GeometryError> {
        row(what, size, self.tp_size, self.tp_rank, "")
    }

    /// This rank's part of each local expert's intermediate size I: rows of both halves of w13, columns of w2. With
    /// expert parallelism it is all of I.
    pub fn expert_intermediate(&self, intermediate_size: usize) -> Result<RowShard, GeometryError> {
        let hint = ", or enable expert parallelism (`enable_expert_parallel`)";
        row("the experts' intermediate size", intermediate_size, self.moe_tp_size, self.moe_tp_rank, hint)
    }

    /// This rank's rows of the vocabulary; the ranks' numbers of rows may differ.
    pub fn vocab_shard(&self, vocab_size: usize) -> Range<usize> {
        partition(vocab_size, self.tp_size, self.tp_rank)
    }

    /// This rank's attention heads. KV heads are split if tp divides their number, and replicated if their number
    /// divides tp.
    pub fn attention_heads(&self, num_heads: usize, num_kv_heads: usize) -> Result<HeadShard, GeometryError> {
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            refuse!(
                GeometryError::Indivisible,
                "{num_heads} query heads cannot be grouped over {num_kv_heads} KV heads; the latter must divide the \
                 former"
            )
        }
        let tp = self.tp_size;
        let rank = self.tp_rank;
        let heads = even("the number of query heads", num_heads, tp, rank, "")?;
        if num_kv_heads.is_multiple_of(tp) {
            let kv_heads = partition(num_kv_heads, tp, rank);
            return Ok(HeadShard { heads, kv_heads, kv_replicas: 1 });
        }
        if !tp.is_multiple_of(num_kv_heads) {
            refuse!(
                GeometryError::Indivisible,
                "{num_kv_heads} KV heads can neither be split over tp {tp} nor replicated; choose a tp that divides \
                 {num_kv_heads} or is a multiple of it"
            )
        }
        let kv_replicas = tp / num_kv_heads;
        let kv_head = rank / kv_replicas;
        Ok(HeadShard { heads, kv_heads: kv_head..kv_head + 1, kv_replicas })
    }

    /// The rank's key heads of linear attention, whose value heads and states stay with them.
    pub fn linear_key_heads(&self, key_heads: usize) -> Result<Range<usize>, GeometryError> {
        even("the number of key heads of linear attention", key_heads, self.tp_size, self.tp_rank, "")
    }
}

fn even(
    what: &'static str,
    size: usize,
    tp: usize,
    rank: usize,
    hint: &'static str,
) -> Result<Range<usize>, GeometryError> {
    if !size.is_multiple_of(tp) {
        refuse!(
            GeometryError::Indivisible,
            "{what} {size} is not divisible by tp {tp}; choose a tp that divides it{hint}"
        )
    }
    Ok(partition(size, tp, rank))
}

fn row(
    what: &'static str,
    size: usize,
    tp: usize,
    rank: usize,
    hint: &'static str,
) -> Result<RowShard, GeometryError> {
    let range = even(what, size, tp, rank, hint)?;
    let segments = row_parallel_segments(size);
    if !segments.is_multiple_of(tp) {
        refuse!(
            GeometryError::Indivisible,
            "{what} {size} is added up in {segments} segments, which tp {tp} does not divide; choose a tp that \
             divides {segments}{hint}"
        )
    }
    Ok(RowShard { size, segments, local_segments: partition(segments, tp, rank), range })
}
