//! Shared experts around dispatch and integrated: one result, and a difference is found.

use moe_dispatch::candle::Result as CandleResult;
use moe_dispatch::{Combine, Dispatched, NoEp, PrepareFinalize, Receiver};
use moe_kernels::WeightAndReduce;
use moe_layer::candle::Result;
use moe_layer::{ActivationFormat, DType, Exec, RouterConfig, SparseMoeBlock, View, ViewMut};

use crate::reference::{Problem, problem};
use crate::{bits, message};

/// A backend whose rows travel on their own, and whose second half may go wrong: then the rows
/// count as weighted already, as if the weights had been overwritten meanwhile.
struct Halves {
    inner: NoEp,
    is_faulty: bool,
}

impl PrepareFinalize for Halves {
    fn name(&self) -> &'static str {
        "halves"
    }

    fn activation_format(&self) -> ActivationFormat {
        self.inner.activation_format()
    }

    fn combine(&self) -> Combine {
        self.inner.combine()
    }

    fn supports_async(&self) -> bool {
        true
    }

    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> CandleResult<Dispatched<'a>> {
        self.inner.prepare(hidden, topk_ids, topk_weights, agreed, ex)
    }

    fn begin_prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        _: Option<&[usize]>,
        _: &mut Exec,
    ) -> CandleResult<Receiver<'a, Dispatched<'a>>> {
        Ok(Receiver::pending(move |ex| {
            let mut dispatched = self.inner.prepare(hidden, topk_ids, topk_weights, None, ex)?;
            dispatched.weights_applied |= self.is_faulty;
            Ok(dispatched)
        }))
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        out: ViewMut,
        ex: &mut Exec,
    ) -> CandleResult<()> {
        self.inner.finalize(expert_out, dispatched, strategy, out, ex)
    }
}

fn block(p: &Problem, is_faulty: bool, layer: usize) -> Result<SparseMoeBlock> {
    let prepare = Box::new(Halves { inner: NoEp::new(), is_faulty });
    SparseMoeBlock::new(p.gate_weight()?, p.router()?, prepare, p.standard_experts()?, layer)
}

#[test]
fn a_faulty_half_is_found_at_load_and_names_its_layer() -> Result<()> {
    let config = RouterConfig { renormalize: true, ..RouterConfig::new(6, 2) };
    for gated in [false, true] {
        let p = problem((6, 24, 16, 5), config.clone(), Some((8, gated)), DType::BF16, 7);
        let shared = || p.shared_experts().transpose().unwrap();
        let (good, bad) = (block(&p, false, 3)?, block(&p, true, 3)?);
        let good = good.with_shared_experts(shared()?)?;
        good.check_shared_experts()?;
        // What a step runs is the form around dispatch; it has the bits of the block without halves.
        let x = p.rows()?;
        assert_eq!(bits(&good.forward(&x)?), bits(&p.standard()?.forward(&x)?));
        p.standard()?.check_shared_experts()?;
        p.batched()?.check_shared_experts()?;
        // Without shared experts there is one form, and nothing to find.
        bad.check_shared_experts()?;
        let e = message(bad.with_shared_experts(shared()?)?.check_shared_experts());
        assert!(
            e.contains("MoE layer 3: shared experts computed around dispatch (halves) differ from the integrated form"),
            "{e}"
        );
    }
    Ok(())
}

#[test]
fn the_path_of_decode_steps_is_checked_too() -> Result<()> {
    let p = problem((6, 24, 16, 5), RouterConfig::new(6, 2), Some((8, false)), DType::F32, 7);
    let faulty = Box::new(Halves { inner: NoEp::new(), is_faulty: true });
    let block = p.standard()?.with_decode_path(faulty, p.standard_experts()?)?;
    let e = message(block.check_shared_experts());
    assert!(e.contains("MoE layer 0") && e.contains("(halves)"), "{e}");
    Ok(())
}
