//! The functions on candle tensors give the results of the functions on views, and refuse the same arguments.

mod common;

use common::{Problem, bits, problems, run_experts};
use moe_dispatch::candle::{DType, Device, Result, Tensor};
use moe_dispatch::{
    ActivationFormat, DispatchedTensors, Dispatcher, Exec, LocalExperts, NoEp, WeightAndReduce, group_slots,
    moe_align_block_size, weight_and_reduce,
};
use proptest::prelude::*;

const CPU: Device = Device::Cpu;

fn inputs(p: &Problem) -> Result<(Tensor, Tensor, Tensor)> {
    let slots = (p.tokens, p.top_k);
    Ok((
        Tensor::from_slice(&p.rows, (p.tokens, p.hidden), &CPU)?,
        Tensor::from_slice(&p.ids, slots, &CPU)?,
        Tensor::from_slice(&p.weights, slots, &CPU)?,
    ))
}

/// Experts on tensors that use the experts on views.
fn experts(p: &Problem, d: &moe_dispatch::DispatchedTensors) -> Result<Tensor> {
    use moe_dispatch::{Dispatched, View};
    let rows = d.rows.flatten_all()?.to_vec1::<f32>()?;
    let rows = View::new(&rows, d.rows.dims())?;
    let ids = View::new(&p.ids, &[p.tokens, p.top_k])?;
    let weights = View::new(&p.weights, &[p.tokens, p.top_k])?;
    let counts = d.expert_num_tokens.as_ref().map(|t| t.to_vec1::<u32>()).transpose()?;
    let map = d.expert_map.as_ref().map(|t| t.to_vec1::<i32>()).transpose()?;
    let mut dispatched = match &counts {
        Some(counts) => Dispatched::batched(rows, View::new(counts, &[counts.len()])?, ids, weights),
        None => Dispatched::standard(rows, ids, weights),
    };
    dispatched.expert_map = map.as_ref().map(|map| View::new(map, &[map.len()])).transpose()?;
    assert_eq!(dispatched.format, d.format);
    Tensor::from_slice(&run_experts::<f32>(&dispatched)?, &*dispatched.expert_out_dims()?, &CPU)
}

proptest! {
    #[test]
    fn the_dispatcher_equals_the_views(p in problems()) {
        let (hidden, ids, weights) = inputs(&p).unwrap();
        let backend = NoEp::new().with_local_experts(p.experts().unwrap());
        let want = bits(&p.run::<f32>(&backend, &mut Exec::cpu()).unwrap());
        let batched = NoEp::batched(p.experts().unwrap(), p.most_rows());
        for dispatcher in [Dispatcher::new(backend), Dispatcher::new(batched)] {
            for _ in 0..2 {
                let out = dispatcher.forward(&hidden, &ids, &weights, |d| experts(&p, d)).unwrap();
                let out = out.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                prop_assert_eq!(bits(&out), want.clone(), "{}", dispatcher.backend().name());
            }
        }
    }

    /// The four strategies on tensors: contiguous slot rows, and batched rows with and without a map.
    #[test]
    fn strategies_on_tensors_agree(p in problems()) {
        let (_, ids, weights) = inputs(&p).unwrap();
        let map = Tensor::from_slice(&p.map, p.map.len(), &CPU).unwrap();
        let want = bits(&p.run::<f32>(&NoEp::new().with_local_experts(p.experts().unwrap()), &mut Exec::cpu()).unwrap());
        let rows = [
            (WeightAndReduce::Contiguous, Dispatcher::new(NoEp::new().with_local_experts(p.experts().unwrap()))),
            (
                WeightAndReduce::NaiveBatched { rank: 3 },
                Dispatcher::new(NoEp::batched(p.experts().unwrap(), p.most_rows())),
            ),
        ];
        for (strategy, dispatcher) in rows {
            let mut expert_out = None;
            let (hidden, ids, weights) = inputs(&p).unwrap();
            dispatcher.forward(&hidden, &ids, &weights, |d| {
                let y = experts(&p, d)?;
                expert_out = Some(y.clone());
                Ok(y)
            }).unwrap();
            let y = expert_out.unwrap();
            let got = weight_and_reduce(strategy, &y, &ids, &weights, Some(&map), DType::F32).unwrap();
            prop_assert_eq!(bits(&got.flatten_all().unwrap().to_vec1::<f32>().unwrap()), want.clone());
            if strategy == WeightAndReduce::Contiguous {
                let flat = y.reshape((p.tokens * p.top_k, p.hidden)).unwrap();
                let got = weight_and_reduce(strategy, &flat, &ids, &weights, Some(&map), DType::F32).unwrap();
                prop_assert_eq!(bits(&got.flatten_all().unwrap().to_vec1::<f32>().unwrap()), want.clone());
            }
        }
        let reduced = Tensor::ones((p.tokens, p.hidden), DType::F32, &CPU).unwrap();
        let got = weight_and_reduce(WeightAndReduce::NoOp, &reduced, &ids, &weights, None, DType::BF16).unwrap();
        prop_assert_eq!(got.dtype(), DType::BF16);
        prop_assert_eq!(got.dims(), reduced.dims());
    }
}

#[test]
fn naive_batched_places_experts_by_rank() -> Result<()> {
    // Rank 1 holds experts 2 and 3. Token 0 has chosen 3 and 0, token 1 has chosen 2 and 3.
    let ids = Tensor::new(&[[3u32, 0], [2, 3]], &CPU)?;
    let weights = Tensor::new(&[[0.5f32, 9.], [2., 4.]], &CPU)?;
    let rows = Tensor::new(&[[[10f32], [f32::NAN]], [[1.], [100.]]], &CPU)?;
    let strategy = WeightAndReduce::NaiveBatched { rank: 1 };
    let out = weight_and_reduce(strategy, &rows, &ids, &weights, None, DType::F32)?;
    assert_eq!(out.to_vec2::<f32>()?, [[0.5], [2. * 10. + 4. * 100.]]);
    Ok(())
}

#[test]
fn standard_rows_are_not_copied_and_bf16_experts_may_return_bf16() -> Result<()> {
    let hidden = Tensor::new(&[[1f32, 2.], [3., 4.]], &CPU)?.to_dtype(DType::BF16)?;
    let ids = Tensor::new(&[[0u32], [u32::MAX]], &CPU)?;
    let weights = Tensor::new(&[[0.5f32], [7.]], &CPU)?;
    let out = Dispatcher::new(NoEp::new()).forward(&hidden, &ids, &weights, |d| {
        assert_eq!(d.format, ActivationFormat::Standard);
        assert_eq!(d.rows.id(), hidden.id());
        assert_eq!(d.topk_ids.as_ref().map(|t| t.dims().to_vec()), Some(vec![2, 1]));
        d.rows.unsqueeze(1)
    })?;
    assert_eq!(out.dtype(), DType::BF16);
    assert_eq!(out.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[0.5, 1.], [0., 0.]]);
    Ok(())
}

#[test]
fn alignment_on_tensors() -> Result<()> {
    let ids = Tensor::new(&[[1u32, 2], [2, 0], [u32::MAX, 2]], &CPU)?;
    let map = Tensor::new(&[-1i32, 0, 1], &CPU)?;
    let (offsets, slots) = group_slots(&ids, Some(&map), 2)?;
    assert_eq!(offsets.to_vec1::<u32>()?, [0, 1, 4]);
    assert_eq!(slots.to_vec1::<u32>()?[..4], [0, 1, 2, 5]);

    let a = moe_align_block_size(&ids, 2, 2, Some(&map))?;
    assert_eq!(a.num_tokens_post_padded.to_vec1::<u32>()?, [8]);
    assert_eq!(a.sorted_token_ids.to_vec1::<u32>()?[..8], [0, 6, 1, 2, 5, 6, 3, 4]);
    assert_eq!(a.expert_ids.to_vec1::<i32>()?[..4], [0, 1, 1, -1]);

    let sorted = |ids: &Tensor| -> Result<Vec<u32>> {
        moe_align_block_size(ids, 2, 2, Some(&map))?.sorted_token_ids.to_vec1()
    };
    assert_eq!(sorted(&ids.t()?)?, sorted(&ids.t()?.contiguous()?)?);
    let e = moe_align_block_size(&ids, 512, 2, Some(&map)).unwrap_err().to_string();
    assert!(e.contains("expected a block size of 1 to 256, got 512"), "{e}");
    let e = group_slots(&ids, None, 2).unwrap_err().to_string();
    assert!(e.contains("expert id 2 is out of range; expected 0..2"), "{e}");
    let scalar = Tensor::new(1u32, &CPU)?;
    let e =
        weight_and_reduce(WeightAndReduce::NoOp, &scalar, &scalar, &scalar, None, DType::F32).unwrap_err();
    assert!(e.to_string().contains("weight_and_reduce: expected topk_ids with 2 dimensions, got []"), "{e}");
    Ok(())
}

#[test]
fn wrong_experts_are_refused() -> Result<()> {
    let hidden = Tensor::new(&[[1f32, 2.]], &CPU)?;
    let ids = Tensor::new(&[[0u32, 1]], &CPU)?;
    let weights = Tensor::new(&[[0.5f32, 0.5]], &CPU)?;
    let dispatcher = Dispatcher::new(NoEp::batched(LocalExperts::all(2), 1));
    let e = dispatcher.forward(&hidden, &ids, &weights, |d| d.rows.narrow(2, 0, 1)).unwrap_err().to_string();
    assert!(e.contains("expected expert_out with dims [2, 1, 2], got [2, 1, 1]"), "{e}");
    let integers = |d: &DispatchedTensors| d.rows.to_dtype(DType::I64);
    let e = dispatcher.forward(&hidden, &ids, &weights, integers).unwrap_err().to_string();
    assert!(e.contains("expected the experts' rows of dtype f32, bf16 or f16, got i64"), "{e}");
    Ok(())
}

/// No view has five dimensions or holds f64 and f8, so these tensors are refused before there is one.
#[test]
fn tensors_that_no_view_can_have_are_named() -> Result<()> {
    let hidden = Tensor::zeros((2, 4), DType::F32, &CPU)?;
    let ids = Tensor::new(&[[0u32, 1], [1, 0]], &CPU)?;
    let weights = Tensor::ones((2, 2), DType::F32, &CPU)?;
    let dispatcher = Dispatcher::new(NoEp::new());
    let refused = |hidden: &Tensor, ids: &Tensor, weights: &Tensor| {
        dispatcher.forward(hidden, ids, weights, |d| Ok(d.rows.clone())).unwrap_err().to_string()
    };
    let deep = hidden.reshape((1, 1, 1, 2, 4))?;
    let reduce = |rows: &Tensor, dtype| {
        let strategy = WeightAndReduce::Contiguous;
        weight_and_reduce(strategy, rows, &ids, &weights, None, dtype).unwrap_err().to_string()
    };
    let rows = Tensor::zeros((2, 2, 4), DType::F32, &CPU)?;
    let map = Tensor::new(&[0i64, 1], &CPU)?;
    for (got, want) in [
        (refused(&deep, &ids, &weights), "NoEp: expected hidden with 2 dimensions, got [1, 1, 1, 2, 4]"),
        (
            refused(&hidden.to_dtype(DType::F64)?, &ids, &weights),
            "NoEp: expected hidden of dtype f32, bf16 or f16, got f64",
        ),
        (
            refused(&hidden, &ids.to_dtype(DType::F64)?, &weights),
            "NoEp: expected topk_ids of dtype u32, got f64",
        ),
        (
            reduce(&rows.to_dtype(DType::F64)?, DType::F32),
            "weight_and_reduce: expected expert_out of dtype f32, bf16 or f16, got f64",
        ),
        (
            reduce(&deep, DType::F32),
            "weight_and_reduce: expected expert_out with 3 dimensions, got [1, 1, 1, 2, 4]",
        ),
        (
            reduce(&rows, DType::U32),
            "weight_and_reduce: expected a result of dtype f32, bf16 or f16, got u32",
        ),
        (
            group_slots(&ids, Some(&map), 2).unwrap_err().to_string(),
            "group_slots: expected expert_map of dtype i32, got i64",
        ),
        (
            group_slots(&ids, None, 1 << 40).unwrap_err().to_string(),
            "group_slots: expected fewer than 2147483647 local experts, got 1099511627776",
        ),
        (
            moe_align_block_size(&hidden, 4, 2, None).unwrap_err().to_string(),
            "moe_align_block_size: expected topk_ids of dtype u32, got f32",
        ),
    ] {
        assert!(got.starts_with(want), "{got}");
    }
    Ok(())
}
