//! Compares block alignment with brute force, and with the behaviour that vLLM's own tests state.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::NO_EXPERT;
use crate::align::tests::{local_of, routing};

struct Aligned {
    sorted: Vec<u32>,
    blocks: Vec<i32>,
    used: usize,
}

/// Runs an alignment with buffers of the maximum plus `extra` elements, which are full of garbage.
fn run(
    max: AlignedSizes,
    extra: usize,
    f: impl FnOnce(AlignedTokens, &mut Exec) -> Result<()>,
) -> Result<Aligned> {
    let mut sorted = vec![77u32; max.sorted_token_ids + extra];
    let mut blocks = vec![88i32; max.expert_ids + extra];
    let mut used = [99u32];
    let n = sorted.len();
    let b = blocks.len();
    let out = AlignedTokens {
        sorted_token_ids: ViewMut::new(&mut sorted, &[n])?,
        expert_ids: ViewMut::new(&mut blocks, &[b])?,
        num_tokens_post_padded: ViewMut::new(&mut used, &[1])?,
    };
    f(out, &mut Exec::cpu())?;
    Ok(Aligned { sorted, blocks, used: used[0] as usize })
}

fn align(ids: &[u32], k: usize, map: Option<&[i32]>, local: usize, block: usize) -> Result<Aligned> {
    let max = max_aligned_sizes(ids.len(), local, block)?;
    run(max, ids.len() % 3, |out, ex| {
        let map = map.map(|m| View::new(m, &[m.len()])).transpose()?;
        align_tokens_into(View::new(ids, &[ids.len() / k, k])?, map, local, block, out, ex)
    })
}

/// The definition: groups of slots in order, each padded to whole blocks with the sentinel.
fn brute_force(groups: &[(i32, Vec<u32>)], block: usize, sentinel: u32) -> (Vec<u32>, Vec<i32>) {
    let mut sorted = Vec::new();
    let mut blocks = Vec::new();
    for (id, group) in groups {
        for chunk in group.chunks(block) {
            blocks.push(*id);
            sorted.extend_from_slice(chunk);
            sorted.extend(std::iter::repeat_n(sentinel, block - chunk.len()));
        }
    }
    (sorted, blocks)
}

fn check(a: &Aligned, groups: &[(i32, Vec<u32>)], block: usize, sentinel: u32) {
    let (sorted, blocks) = brute_force(groups, block, sentinel);
    assert_eq!(a.used, sorted.len());
    assert_eq!(&a.sorted[..a.used], &sorted[..]);
    assert_eq!(&a.blocks[..blocks.len()], &blocks[..]);
    assert!(a.sorted[a.used..].iter().all(|&s| s == sentinel), "unused entries are not padding");
    assert!(a.blocks[blocks.len()..].iter().all(|&b| b == -1), "unused blocks are not skipped");
}

proptest! {
    #[test]
    fn blocks_match_the_definition(
        (ids, k, map, local) in routing(), block in prop_oneof![1usize..=20, Just(256)],
    ) {
        let a = align(&ids, k, map.as_deref(), local, block).unwrap();
        let slots = |want: Option<usize>| -> Vec<u32> {
            (0..ids.len()).filter(|&s| local_of(ids[s], &map) == want).map(|s| s as u32).collect()
        };
        let mut groups: Vec<_> = (0..local).map(|e| (e as i32, slots(Some(e)))).collect();
        groups.push((-1, slots(None)));
        check(&a, &groups, block, ids.len() as u32);
    }
}

#[test]
fn the_documented_example_of_vllm() {
    // Four tokens, three experts each, block 4; vLLM numbers these experts 1 to 4.
    let ids = [1, 2, 3, 0, 1, 3, 0, 2, 3, 0, 1, 2];
    let a = align(&ids, 3, None, 4, 4).unwrap();
    assert_eq!(a.used, 16);
    assert_eq!(&a.sorted[..16], &[3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]);
    assert_eq!(&a.blocks[..4], &[0, 1, 2, 3]);
}

/// K distinct experts per token, spread without a random generator.
fn spread(tokens: usize, k: usize, experts: usize) -> Vec<u32> {
    (0..tokens).flat_map(|t| (0..k).map(move |i| ((t * 7 + i * (t % 5 + 1)) % experts) as u32)).collect()
}

#[test]
fn behaviours_that_vllm_tests() {
    // Sizes of tests/kernels/moe/test_moe_align_block_size.py.
    for (tokens, k, experts, block) in
        [(1, 1, 32, 32), (3, 2, 160, 128), (256, 16, 257, 32), (2256, 32, 256, 128)]
    {
        let ids = spread(tokens, k, experts);
        let a = align(&ids, k, None, experts, block).unwrap();
        assert_eq!(a.used % block, 0);
        assert!(a.used >= ids.len());
        let valid: Vec<u32> = a.sorted.iter().copied().filter(|&s| (s as usize) < ids.len()).collect();
        assert_eq!(valid.len(), ids.len());
        assert_eq!(valid.iter().collect::<BTreeSet<_>>().len(), ids.len(), "a slot is listed twice");
        for (b, &e) in a.blocks[..a.used / block].iter().enumerate() {
            assert!((0..experts as i32).contains(&e));
            let entries = &a.sorted[b * block..(b + 1) * block];
            assert!(
                entries.iter().filter(|&&s| (s as usize) < ids.len()).all(|&s| ids[s as usize] == e as u32)
            );
        }
        for _ in 0..3 {
            let again = align(&ids, k, None, experts, block).unwrap();
            assert_eq!(
                (again.sorted, again.blocks, again.used),
                (a.sorted.clone(), a.blocks.clone(), a.used)
            );
        }
    }
}

#[test]
fn the_maximum_is_reached() {
    // With fewer slots than groups, every slot opens a block.
    let a = align(&[0, 2, 4], 1, None, 5, 16).unwrap();
    assert_eq!(a.used, 3 * 16);
    assert_eq!(max_aligned_sizes(3, 5, 16).unwrap(), AlignedSizes { sorted_token_ids: 48, expert_ids: 3 });
    // Every group wastes block - 1 entries, including the group of absent experts.
    let a = align(&[0, 1, NO_EXPERT], 3, None, 2, 7).unwrap();
    assert_eq!((a.used, max_aligned_sizes(3, 2, 7).unwrap().sorted_token_ids), (21, 24));
    assert_eq!(&a.blocks[..3], &[0, 1, -1]);
    assert_eq!(max_aligned_sizes(0, 8, 16).unwrap(), AlignedSizes { sorted_token_ids: 0, expert_ids: 0 });
    assert_eq!(max_aligned_sizes(8, 0, 1).unwrap(), AlignedSizes { sorted_token_ids: 8, expert_ids: 8 });
}

#[test]
fn bad_sizes_are_named() {
    for block in [0, 257] {
        let e = align(&[0], 1, None, 1, block).err().unwrap().to_string();
        assert!(e.contains("expected a block size of 1 to 256") && e.contains(&block.to_string()), "{e}");
    }
    let e = max_aligned_sizes(usize::MAX, 4, 16).unwrap_err().to_string();
    assert!(e.contains("do not fit in u32"), "{e}");
    let e = max_aligned_sizes(4, usize::MAX, 16).unwrap_err().to_string();
    assert!(e.contains("do not fit in the i32"), "{e}");

    let small = AlignedSizes { sorted_token_ids: 15, expert_ids: 1 };
    let ids = View::new(&[0u32], &[1, 1]).unwrap();
    let e = run(small, 0, |out, ex| align_tokens_into(ids, None, 1, 16, out, ex)).err().unwrap().to_string();
    assert!(e.contains("expected sorted_token_ids with at least 16 elements, got 15"), "{e}");
}
