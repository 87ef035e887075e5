//! Tests of the step context in the block: capture, replay, heat, force-balance.

use std::sync::Arc;

use moe_layer::candle::Result;
use moe_layer::{DType, Exec, ExpertHeat, NO_EXPERT, RoutedExperts, SparseMoeBlock, StepContext};

use crate::reference::{Problem, example};
use crate::{bits, floats, message, run_in};

/// The MoE layer of the tested block. It is not 0, so that a block that ignores it fails.
const LAYER: usize = 1;

fn block(p: &Problem) -> Result<SparseMoeBlock> {
    let prepare = Box::new(moe_layer::NoEp::new());
    SparseMoeBlock::new(p.gate_weight()?, p.router()?, prepare, p.standard_experts()?, LAYER)
}

fn recording(p: &Problem) -> Result<StepContext> {
    let context = StepContext {
        capture: Some(RoutedExperts::empty(p.tokens, 2, p.config.top_k)?),
        heat: Some(ExpertHeat::new(2, p.config.num_experts)),
        ..StepContext::default()
    };
    Ok(context)
}

#[test]
fn capture_and_heat_are_the_definition_of_routing() -> Result<()> {
    let p = example(DType::F32);
    let mut context = recording(&p)?;
    let out = run_in(&mut context, &block(&p)?, &p.rows()?, DType::F32, &mut Exec::cpu())?;
    assert_eq!(bits(&out), bits(&block(&p)?.forward(&p.rows()?)?), "recording changes nothing");
    let capture = context.capture.expect("capture");
    let heat = context.heat.expect("heat");
    let mut counts = vec![0u64; p.config.num_experts];
    for t in 0..p.tokens {
        let (ids, _, gap) = p.route(t);
        assert!(gap > 1e-5);
        assert_eq!(capture.get(t, LAYER)?, free_ids(&p, t));
        assert_eq!(capture.get(t, 0)?, [NO_EXPERT; 2]);
        ids.into_iter().for_each(|e| counts[e] += 1);
    }
    assert_eq!((heat.layer(LAYER), heat.layer(0)), (&counts[..], &[0u64; 6][..]));
    Ok(())
}

#[test]
fn a_replayed_capture_gives_the_same_bits_and_another_does_not() -> Result<()> {
    let p = example(DType::BF16);
    let block = block(&p)?;
    let x = p.rows()?;
    let mut context = recording(&p)?;
    let free = bits(&run_in(&mut context, &block, &x, DType::BF16, &mut Exec::cpu())?);
    let captured = context.capture.take().expect("capture");
    let replayed = |replay: RoutedExperts| -> Result<(Vec<u32>, RoutedExperts)> {
        let mut context = recording(&p)?;
        context.replay = Some(Arc::new(replay));
        let out = bits(&run_in(&mut context, &block, &x, DType::BF16, &mut Exec::cpu())?);
        Ok((out, context.capture.take().expect("capture")))
    };
    assert_eq!(replayed(captured.clone())?, (free.clone(), captured.clone()));

    let mut other = captured.clone();
    let chosen = captured.get(3, LAYER)?.to_vec();
    let unused: Vec<u32> = (0..6).filter(|e| !chosen.contains(e)).take(2).collect();
    other.set(3, LAYER, &unused)?;
    let (out, recorded) = replayed(other.clone())?;
    assert_eq!(recorded, other);
    let rows = |bits: &[u32]| bits.chunks(p.hidden).map(<[u32]>::to_vec).collect::<Vec<_>>();
    let same: Vec<bool> = rows(&out).iter().zip(&rows(&free)).map(|(a, b)| a == b).collect();
    assert_eq!(same, [true, true, true, false, true]);
    Ok(())
}

#[test]
fn force_balance_reaches_the_experts() -> Result<()> {
    let p = example(DType::F32);
    let block = block(&p)?;
    let x = p.rows()?;
    let mut context = recording(&p)?;
    context.force_balance = Some(5);
    let balanced = run_in(&mut context, &block, &x, DType::F32, &mut Exec::cpu())?;
    assert_ne!(floats(&balanced), floats(&block.forward(&x)?));
    let heat = context.heat.take().expect("heat");
    assert_eq!(heat.layer(LAYER).iter().sum::<u64>(), 10);
    let captured = context.capture.take().expect("capture");
    let spread = (0..p.tokens).filter(|&t| captured.get(t, LAYER).unwrap() != free_ids(&p, t)).count();
    assert!(spread > 0, "{captured:?}");
    Ok(())
}

#[test]
fn a_context_that_does_not_fit_is_an_error() -> Result<()> {
    let p = example(DType::F32);
    let mut context =
        StepContext { capture: Some(RoutedExperts::empty(p.tokens, LAYER, 2)?), ..StepContext::default() };
    let e = message(run_in(&mut context, &block(&p)?, &p.rows()?, DType::F32, &mut Exec::cpu()));
    assert!(e.contains("the capture holds [5, 1, 2] ids, too few") && e.contains("MoE layer 1"), "{e}");
    Ok(())
}

/// Returns the ids of a token without force-balance.
fn free_ids(p: &Problem, token: usize) -> Vec<u32> {
    p.route(token).0.iter().map(|&e| e as u32).collect()
}
