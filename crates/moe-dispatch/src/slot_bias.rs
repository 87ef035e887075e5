//! Adds the bias of experts that are cut over ranks. It is added once, to whole slot rows, after the segments of all
//! ranks.

use candle_core::{DType, Result, bail};
use moe_kernels::arguments::{expect, expect_matrix, expect_rank3};
use moe_kernels::{Float, NO_EXPERT, View, ViewMut, with_float};

/// slots[t, k] += bias\[e\] for the expert e of each slot. Slots without an expert do not change. It works on the CPU
/// only, because only the CPU keeps segments separate.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `bias` | [E, H] f32, bf16 or f16 |
/// | `topk_ids` | [T, K] u32 |
/// | `slots` | [T, K, H] f32 |
///
/// # Errors
/// Wrong dims or dtypes; an id that is no expert.
pub(crate) fn add_slot_bias(op: &str, bias: View, topk_ids: View, mut slots: ViewMut) -> Result<()> {
    let (experts, hidden) = expect_matrix(op, "slot_bias", &bias)?;
    let (tokens, top_k, _) = expect_rank3(op, "slots", &slots)?;
    expect(op, "slots", &slots, DType::F32, &[tokens, top_k, hidden])?;
    expect(op, "topk_ids", &topk_ids, DType::U32, &[tokens, top_k])?;
    let ids = topk_ids.cpu::<u32>()?;
    let slots = slots.cpu_mut::<f32>()?;
    with_float!(bias.dtype(), op, T => {
        let bias = bias.cpu::<T>()?;
        for (row, &id) in slots.chunks_exact_mut(hidden.max(1)).zip(ids) {
            if id == NO_EXPERT {
                continue;
            }
            let Some(bias) = bias.get(id as usize * hidden..(id as usize + 1) * hidden) else {
                bail!("{op}: a slot names expert {id}, but biases are there of {experts}")
            };
            row.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias.widen());
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_gets_the_bias_of_its_expert() -> Result<()> {
        let bias = [1f32, 2.0, 10.0, 20.0];
        let bias = View::new(&bias, &[2, 2])?;
        let add = |ids: [u32; 3]| -> Result<[f32; 6]> {
            let mut slots = [0.5f32; 6];
            add_slot_bias("x", bias, View::new(&ids, &[1, 3])?, ViewMut::new(&mut slots, &[1, 3, 2])?)?;
            Ok(slots)
        };
        assert_eq!(add([1, NO_EXPERT, 0])?, [10.5, 20.5, 0.5, 0.5, 1.5, 2.5]);
        let refused = add([0, 2, 0]).unwrap_err().to_string();
        assert!(refused.contains("names expert 2, but biases are there of 2"), "{refused}");
        Ok(())
    }
}
