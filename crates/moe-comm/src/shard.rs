//! Which slice of a model's tensors a rank holds.
//!
//! Column-parallel weights are cut evenly. Row-parallel products (o_proj, w2, down_proj) are
//! added up in a fixed number of segments of their full K whatever tp is
//! ([`row_parallel_segments`]), so that any tp gives the bits of one rank; a rank must
//! therefore hold whole segments. KV heads fewer than tp are replicated (vLLM's and InfiniLM's
//! rule).

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
    /// The segments that this rank computes.
    pub local_segments: Range<usize>,
    /// The elements of K that this rank computes.
    pub range: Range<usize>,
}

/// This rank's attention heads.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeadShard {
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads: those that the query heads attend to.
    pub kv_heads: Range<usize>,
    /// Ranks that hold the same KV heads.
    pub kv_replicas: usize,
}

impl Geometry {
    /// The rank's part of the reduced size of a row-parallel product over tp (o_proj, a dense
    /// or shared expert's down_proj). `what` names the size in the error.
    pub fn row_shard(&self, what: &'static str, size: usize) -> Result<RowShard, GeometryError> {
        row(what, size, self.tp_size, self.tp_rank, "")
    }

    /// The rank's part of each local expert's intermediate size I: rows of both halves of w13,
    /// columns of w2. All of it with expert parallelism.
    pub fn expert_intermediate(&self, intermediate_size: usize) -> Result<RowShard, GeometryError> {
        let hint = ", or enable expert parallelism (--enable-expert-parallel)";
        row("the experts' intermediate size", intermediate_size, self.moe_tp_size, self.moe_tp_rank, hint)
    }

    /// The rank's rows of the vocabulary; uneven sizes are legal.
    pub fn vocab_shard(&self, vocab_size: usize) -> Range<usize> {
        partition(vocab_size, self.tp_size, self.tp_rank)
    }

    /// The rank's attention heads. KV heads are split if tp divides them, and replicated if
    /// they divide tp.
    pub fn attention_heads(&self, num_heads: usize, num_kv_heads: usize) -> Result<HeadShard, GeometryError> {
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            refuse!(
                GeometryError,
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
                GeometryError,
                "{num_kv_heads} KV heads can neither be split over tp {tp} nor replicated; choose a tp that divides \
                 {num_kv_heads} or is a multiple of it"
            )
        }
        let kv_replicas = tp / num_kv_heads;
        let kv_head = rank / kv_replicas;
        Ok(HeadShard { heads, kv_heads: kv_head..kv_head + 1, kv_replicas })
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
        refuse!(GeometryError, "{what} {size} is not divisible by tp {tp}; choose a tp that divides it{hint}")
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
            GeometryError,
            "{what} {size} is added up in {segments} segments, which tp {tp} does not divide; choose a tp that \
             divides {segments}{hint}"
        )
    }
    Ok(RowShard { size, segments, local_segments: partition(segments, tp, rank), range })
}
