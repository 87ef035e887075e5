//! Assembling steps, and the KV cache's sizes.

use candle_core::{DType, Result};
use model_runtime::{KvCache, KvLayout, LogitsRows, SequenceStep, Step};
use proptest::prelude::*;

use crate::message;

fn seq<'a>(
    token_ids: &'a [u32],
    start: usize,
    prompt_len: usize,
    blocks: &'a [u32],
    logits: LogitsRows,
) -> SequenceStep<'a> {
    SequenceStep { token_ids, start, prompt_len, blocks, logits, scored: &[] }
}

#[test]
fn a_mixed_step() -> Result<()> {
    // Block size 4: a decoding sequence, a chunk of a prompt, a whole prompt with all logits.
    let step = Step::new(
        [
            seq(&[7], 5, 3, &[9, 2], LogitsRows::Last),
            SequenceStep { scored: &[2, 3], ..seq(&[1, 2, 3], 4, 20, &[0, 1, 3], LogitsRows::None) },
            seq(&[4, 5], 0, 2, &[8], LogitsRows::All),
        ],
        4,
    )?;
    assert_eq!(step.token_ids(), [7, 1, 2, 3, 4, 5]);
    assert_eq!(step.positions(), [5, 4, 5, 6, 0, 1]);
    assert_eq!(step.slot_mapping(), [9, 4, 5, 6, 32, 33]);
    assert_eq!(step.rope_len(), [6, 20, 20, 20, 2, 2]);
    assert_eq!(step.query_start_loc(), [0, 1, 4, 6]);
    assert_eq!((step.max_blocks(), step.block_tables()), (3, &[9, 2, 0, 0, 1, 3, 8, 0, 0][..]));
    assert_eq!(step.logits_rows(), [0, 4, 5]);
    assert_eq!([0, 1, 2, 3].map(|s| step.logits_range(s)), [0..1, 1..1, 1..3, 0..0]);
    let views = step.views()?;
    assert_eq!((views.num_tokens(), views.num_logits(), views.num_scored()), (6, 3, 2));
    assert_eq!(step.scored_rows(), [1, 2]);
    assert_eq!([0, 1, 2, 3].map(|s| step.scored_tokens(s)), [&[][..], &[2, 3], &[], &[]]);
    assert_eq!((views.decode_rows, views.one_row_each()), (1, false));
    assert_eq!(views.block_tables.dims(), [3, 3]);
    assert!(message(step.check_vocab(7)).contains("row 0: token id 7 is outside of the vocabulary of 7"));
    step.check_vocab(8)?;
    let scored = Step::new([SequenceStep { scored: &[9], ..seq(&[1], 0, 2, &[0], LogitsRows::None) }], 4)?;
    assert!(message(scored.check_vocab(8)).contains("scored row 0: token id 9"));
    Ok(())
}

#[test]
fn rows_that_decode_are_counted_from_the_first_on() -> Result<()> {
    let sequences = |rows: &[usize]| -> Result<Step> {
        let tokens = [1; 9];
        Step::new(rows.iter().map(|&n| seq(&tokens[..n], 0, 9, &[0], LogitsRows::Last)), 16)
    };
    for (rows, decode) in
        [(&[1, 1, 1][..], 3), (&[1, 1, 4, 1], 2), (&[2, 1, 1], 0), (&[1], 1), (&[5], 0), (&[], 0)]
    {
        let step = sequences(rows)?;
        assert_eq!(step.decode_rows(), decode, "{rows:?}");
        assert_eq!(step.one_row_each(), decode == rows.len(), "{rows:?}");
        assert_eq!(step.views()?.one_row_each(), step.one_row_each(), "{rows:?}");
    }
    Ok(())
}

#[test]
fn attention_of_mixed_steps_is_counted() -> Result<()> {
    let step = |sequences: &[(usize, usize)]| -> Result<Step> {
        let tokens = [1; 9];
        Step::new(
            sequences.iter().map(|&(start, n)| seq(&tokens[..n], start, 40, &[0, 1, 2], LogitsRows::Last)),
            16,
        )
    };
    // Rows at positions 9 and 0, then at 4, 5, 6 and 30.
    assert_eq!(step(&[(9, 1), (0, 1), (4, 3), (30, 1)])?.attention_scores(), [11, 18 + 31]);
    assert_eq!(step(&[(9, 1), (0, 1)])?.attention_scores(), [0; 2]);
    assert_eq!(step(&[(4, 3), (9, 1)])?.attention_scores(), [0; 2]);
    assert_eq!(step(&[])?.attention_scores(), [0; 2]);
    Ok(())
}

#[test]
fn an_empty_step() -> Result<()> {
    let step = Step::new([], 16)?;
    assert_eq!((step.num_tokens(), step.num_sequences(), step.num_logits()), (0, 0, 0));
    assert_eq!(step.views()?.query_start_loc.dims(), [1]);
    Ok(())
}

#[test]
fn wrong_sequences_are_named() {
    let step = |s: SequenceStep| message(Step::new([seq(&[1], 0, 1, &[0], LogitsRows::Last), s], 4));
    let e = step(seq(&[], 0, 1, &[0], LogitsRows::Last));
    assert!(e.contains("sequence 1: expected at least one new token"), "{e}");
    let e = step(seq(&[1, 2], 7, 1, &[0, 1], LogitsRows::Last));
    assert!(e.contains("2 new tokens from position 7 need more KV slots than the 8 of its 2 blocks"), "{e}");
    assert!(step(seq(&[1], 0, 0, &[0], LogitsRows::Last)).contains("prompt of at least one token"));
    assert!(step(seq(&[1], usize::MAX, 1, &[0], LogitsRows::Last)).contains("need more KV slots"));
    assert!(step(seq(&[1], 0, 1 << 32, &[0], LogitsRows::Last)).contains("prompt of 4294967296 tokens"));
    assert!(step(seq(&[1], 0, 1, &[u32::MAX], LogitsRows::Last)).contains("does not fit 32 bits"));
    assert!(message(Step::new([seq(&[1], 0, 1, &[0], LogitsRows::Last)], 0)).contains("KV slots"));
    let e = step(SequenceStep { scored: &[5, 6], ..seq(&[1], 0, 3, &[0], LogitsRows::Last) });
    assert!(e.contains("2 scored rows of 1 new tokens"), "{e}");
}

proptest! {
    /// However a prompt is cut, its tokens get the same slots, positions and rotary lengths.
    #[test]
    fn chunks_of_a_prompt_are_parts_of_the_whole(len in 1usize..60, block_size in 1usize..9, cuts in prop::collection::vec(1usize..20, 0..10)) {
        let tokens: Vec<u32> = (0..len as u32).collect();
        let blocks: Vec<u32> = (0..len.div_ceil(block_size) as u32).map(|b| b * 7 % 61).collect();
        let whole = Step::new([seq(&tokens, 0, len, &blocks, LogitsRows::All)], block_size).unwrap();
        let mut start = 0;
        for size in cuts.into_iter().chain([len]) {
            let end = (start + size).min(len);
            if start == end { continue }
            let part = Step::new([seq(&tokens[start..end], start, len, &blocks, LogitsRows::Last)], block_size).unwrap();
            prop_assert_eq!(part.positions(), &whole.positions()[start..end]);
            prop_assert_eq!(part.slot_mapping(), &whole.slot_mapping()[start..end]);
            prop_assert_eq!(part.rope_len(), &whole.rope_len()[start..end]);
            prop_assert_eq!(part.logits_rows(), &[(end - start - 1) as u32]);
            start = end;
        }
        for (position, &slot) in whole.slot_mapping().iter().enumerate() {
            prop_assert_eq!(slot as usize / block_size, blocks[position / block_size] as usize);
            prop_assert_eq!(slot as usize % block_size, position % block_size);
        }
    }
}

const LAYOUT: KvLayout = KvLayout { num_kv_heads: 2, head_dim: 8, value_dim: Some(8), dtype: DType::BF16 };

#[test]
fn the_cache_is_sized_by_blocks_or_by_bytes() -> Result<()> {
    // 2 (k and v) x 3 layers x 2 heads x 8 x 2 bytes.
    let states = LAYOUT.layers(3);
    assert_eq!(states.bytes_per_token()?, 192);
    assert_eq!((states.blocks_in(192 * 16 * 5 + 191, 16)?, states.blocks_in(3071, 16)?), (5, 0));
    let mut kv = KvCache::new(&states, 5, 16)?;
    assert_eq!((kv.num_blocks(), kv.block_size()), (5, 16));
    let layer = kv.layer_mut(2)?.paged()?;
    assert_eq!((layer.k().dims(), layer.v().dtype()), (&[5, 2, 16, 8][..], DType::BF16));
    assert!(message(kv.layer_mut(3)).contains("layer 3 is outside of a KV cache of 3 layers"));
    Ok(())
}

#[test]
fn absurd_caches_are_refused_before_allocation() {
    let states = LAYOUT.layers(3);
    assert!(message(KvCache::new(&states, 0, 16)).contains("at least one block"));
    assert!(message(KvCache::new(&states, 1, 0)).contains("at least one block"));
    assert!(message(KvCache::new(&states, usize::MAX, 16)).contains("32-bit slot numbers"));
    assert!(message(KvCache::new(&states, 1 << 28, 16)).contains("32-bit slot numbers"));
    let huge = KvLayout { head_dim: 1 << 22, ..LAYOUT }.layers(1 << 20);
    assert!(message(KvCache::new(&huge, 1 << 20, 16)).contains("overflows"));
    let wide = KvLayout { head_dim: usize::MAX / 8, ..LAYOUT }.layers(3);
    assert!(message(wide.bytes_per_token()).contains("3 layers"));
    assert!(message(KvLayout { head_dim: usize::MAX, ..LAYOUT }.bytes_per_token()).contains("overflows"));
    assert!(message(states.blocks_in(100, 0)).contains("no valid size"));
}
