//! A small monolithic kernel: it routes each row to its best expert, which multiplies it by the
//! expert's number plus one.

use moe_layer::candle::{Result, Tensor};
use moe_layer::{
    AnyExperts, DType, Device, Exec, ExpertsShape, ExpertsSpec, MonolithicExperts, Reason, Reservation,
    SparseMoeBlock, View, ViewMut,
};

pub struct Monolith;

impl MonolithicExperts for Monolith {
    fn name(&self) -> &str {
        "monolith"
    }

    fn shape(&self) -> ExpertsShape {
        ExpertsShape { num_local_experts: 3, hidden_size: 2, intermediate_size: 1, dtype: DType::F32 }
    }

    fn supports(&self, _: &ExpertsSpec) -> std::result::Result<(), Reason> {
        Ok(())
    }

    fn workspace(&self, max_tokens: usize, _: usize) -> Result<Reservation> {
        Reservation::new().with(DType::F32, &[max_tokens])
    }

    fn apply(&self, hidden: View, router_logits: View, mut out: ViewMut, _: &mut Exec) -> Result<()> {
        let rows = hidden.cpu::<f32>()?.chunks(2).zip(router_logits.cpu::<f32>()?.chunks(3));
        for (out, (row, logits)) in out.cpu_mut::<f32>()?.chunks_mut(2).zip(rows) {
            let best = (0..3).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            out.iter_mut().zip(row).for_each(|(out, x)| *out = (best + 1) as f32 * x);
        }
        Ok(())
    }
}

pub fn monolith() -> AnyExperts {
    AnyExperts::Monolithic(Box::new(Monolith))
}

/// Its block; the gate's experts look at the first column, at the second, and against both.
pub fn block() -> Result<SparseMoeBlock> {
    let gate = Tensor::new(&[[1f32, 0.], [0., 1.], [-1., -1.]], &Device::Cpu)?;
    SparseMoeBlock::new_monolithic(gate, monolith(), 0)
}

#[test]
fn monolithic_experts_get_the_logits() -> Result<()> {
    let block = block()?;
    let x = Tensor::new(&[[3f32, 1.], [1., 3.], [-1., -3.]], &Device::Cpu)?;
    assert_eq!(block.forward(&x)?.to_vec2::<f32>()?, [[3., 1.], [2., 6.], [-3., -9.]]);
    assert!(block.router().is_none());
    assert_eq!((block.experts_name(), block.experts_workspace(7)?.bytes()), ("monolith", 28));
    assert!(format!("{block:?}").contains("experts: \"monolith\""));
    Ok(())
}
