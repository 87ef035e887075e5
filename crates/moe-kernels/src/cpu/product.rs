//! The fixed order in which every product of the crate is summed.
//!
//! One output is `x · w` over K. K is cut into S equal segments (S = 1 unless the product is row
//! parallel) and a segment into blocks of [`K_BLOCK`]. A block is one chain of f32 multiply-adds
//! from 0, in ascending order of k; block sums are added in ascending order, and so are segment
//! sums:
//!
//! ```text
//! for segment:  for block:  chain = 0; for k: chain = x[k] * w[k] + chain
//!                           segment_sum = first block ? chain : segment_sum + chain
//!               sum = first segment ? segment_sum : sum + segment_sum
//! ```
//!
//! A vector lane holds one output, never a part of one, so no order depends on the number of
//! rows, on tiles or on threads. Blocks bound the error: |got - exact| <= (K_BLOCK + K / K_BLOCK)
//! · 2^-24 · Σ|x w| to first order, twice that where multiply and add round separately.
//!
//! bf16 is widened, except on the path with the BF16 dot product of AVX-512. There its chains advance by pairs, chain =
//! x\[k\] * w\[k\] + (x[k + 1] * w[k + 1] + chain), and subnormals are flushed.
//!
//! On the path with AMX, a bf16 segment is one chain of blocks of 32, the last one padded with zeros. Within a block,
//! even and odd k have separate chains, and subnormals are flushed: chain = chain + (even + odd). A segment is rounded
//! at most K / 32 + 18 times.

/// Length of the longest chain.
pub(crate) const K_BLOCK: usize = 256;

/// One chain of a product, and what becomes of its sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// The segment that it is part of.
    pub segment: usize,
    /// First k.
    pub start: usize,
    /// Number of k.
    pub len: usize,
    /// Whether the sum goes to the segment's sum; otherwise it goes to the total.
    pub to_segment: bool,
    /// Whether the sum is added there; otherwise it replaces what is there.
    pub add: bool,
    /// If the chain ends its segment: whether the segment's sum is then added to the total (`true`) or becomes it.
    pub flush: Option<bool>,
}

/// The chains of a product over K in order.
pub(crate) fn chains(k: usize, segments: usize) -> impl Iterator<Item = Chain> {
    let length = k / segments;
    let blocks = length.div_ceil(K_BLOCK);
    let nested = segments > 1 && blocks > 1;
    (0..segments).flat_map(move |segment| {
        (0..blocks).map(move |block| {
            let start = block * K_BLOCK;
            Chain {
                segment,
                start: segment * length + start,
                len: K_BLOCK.min(length - start),
                to_segment: nested,
                add: block > 0 || !nested && segment > 0,
                flush: (nested && block + 1 == blocks).then_some(segment > 0),
            }
        })
    })
}
