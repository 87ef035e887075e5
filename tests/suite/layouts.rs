//! One set of weights in two checkpoint layouts gives the same bits.

use candle_core::{DType, Result};
use model_runtime::{CausalLm, Exec};
use moe_tests::{Schedule, all_logits, load};

fn assert_same(a: &str, b: &str) -> Result<()> {
    let schedule = Schedule { chunk: 100, block_size: 16, together: true };
    for dtype in [DType::F32, DType::BF16] {
        let first = load(a, dtype)?;
        let second = load(b, dtype)?;
        let tokens = vec![(0..20).map(|i| i * 5 % first.info().vocab_size as u32).collect::<Vec<u32>>()];
        let mut ex = Exec::cpu();
        let x = all_logits(&first, &tokens, schedule, &mut ex)?;
        let y = all_logits(&second, &tokens, schedule, &mut ex)?;
        assert_eq!(x, y, "{a} and {b} hold the same weights");
    }
    Ok(())
}

#[test]
fn packed_experts_equal_one_by_one() -> Result<()> {
    assert_same("saved", "packed")
}

#[test]
fn shards_equal_packed_shards() -> Result<()> {
    assert_same("sharded", "packed-hub")
}
