//! Quantised experts that move from one pack to another.

use candle_core::{DType, Result, Tensor};
use moe_kernels::quant::{QuantMatrix, QuantRows, QuantUse};
use moe_kernels::{Exec, QuantScheme, Weight};

use crate::quantised::{Plain, int, schemes};

const N: usize = 20;
const K: usize = 96;

/// Three experts with scales that are f16, or that need f32.
fn pack(scheme: QuantScheme, usage: QuantUse, narrow: bool, seed: u64) -> Weight {
    let experts: Vec<Plain> = (0..3).map(|e| Plain::new(N, K, scheme, narrow, seed + e)).collect();
    let rows: Vec<&dyn QuantRows> = experts.iter().map(|e| e as &dyn QuantRows).collect();
    Weight::of_quantised(QuantMatrix::pack(&rows, usage, &Exec::cpu()).unwrap(), DType::F32).unwrap()
}

fn expert(weight: &Weight, expert: usize) -> Result<Vec<f32>> {
    let all: Tensor = weight.to_tensor()?;
    all.get(expert)?.flatten_all()?.to_vec1()
}

#[test]
fn an_expert_has_the_same_numbers_in_another_pack() -> Result<()> {
    let can_move = |s: &QuantScheme| !s.act_order;
    for scheme in schemes(K).into_iter().filter(can_move) {
        for usage in [QuantUse::GateUp, QuantUse::RowParallel { segments: 4 }, QuantUse::Linear] {
            for (narrow, wide) in [(true, true), (true, false), (false, true)] {
                let from = pack(scheme, usage, wide, 50);
                let to = pack(scheme, usage, narrow, 90);
                let kept = [expert(&to, 0)?, expert(&to, 2)?];
                let clone = to.clone();
                let bytes = from.expert_bytes(2)?;
                assert_eq!(bytes.len(), to.expert_len()?, "{scheme}");
                to.write_expert(1, &bytes)?;
                assert_eq!(expert(&clone, 1)?, expert(&from, 2)?, "{scheme} {usage:?}");
                assert_eq!([expert(&clone, 0)?, expert(&clone, 2)?], kept, "{scheme} {usage:?}");
                // Whatever a pack keeps scales in, the bytes are the same.
                assert_eq!(to.expert_bytes(1)?, bytes, "{scheme} {usage:?}");
                assert!(to.write_expert(1, &bytes[1..]).is_err() && to.write_expert(3, &bytes).is_err());
            }
        }
    }
    Ok(())
}

#[test]
fn experts_with_an_order_of_columns_of_their_own_stay() {
    let weight = pack(int(4, 32, true, true), QuantUse::GateUp, true, 7);
    for error in
        [weight.expert_len().map(drop), weight.expert_bytes(0).map(drop), weight.write_expert(0, &[])]
    {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("act-order") && error.contains("desc_act"), "{error}");
    }
}
