//! The explanations are correct on a GPU: each layer launches the kernels in its plan, by name.

use candle_core::{DType, Device};
use model_families::ALL;
use model_runtime::{
    BlockContext, CausalLm, Config, DummyWeights, Exec, Geometry, LogitsRows, MlaForm, RankView, StepContext,
};
use moe_engine::LoadOptions;
use moe_kernels::plan::Fp8Activations;
use moe_layer::{MoePath, PlanStep, SharedExpertsStream};
use moe_tests::explained::{ShownStep, expect_explained};

use crate::common::cuda;
use crate::deepseek::CONFIG as DEEPSEEK;
use crate::engine::CONFIG as QWEN;
use crate::hybrid::CONFIG as HYBRID;

/// Every number of rows that a graph of a decode step is recorded for.
fn buckets() -> impl Iterator<Item = usize> {
    [1, 2, 4].into_iter().chain((8..=1024).step_by(8))
}

/// Decode steps of every bucket and of more rows, prompts, and both in one step.
pub fn steps() -> Vec<ShownStep> {
    let mut steps: Vec<ShownStep> = buckets().chain([1025]).map(|rows| ShownStep::new(rows, &[])).collect();
    for rows in [1, 5, 64, 65, 300, 600, 1100] {
        steps.push(ShownStep::new(0, &[rows]));
        steps.push(ShownStep::new(0, &[rows, 3]));
    }
    for (decoding, prompts) in
        [(1, vec![1]), (1, vec![300]), (8, vec![7, 5]), (64, vec![236]), (200, vec![40, 31]), (9, vec![513])]
    {
        steps.push(ShownStep::new(decoding, &prompts));
    }
    let mixed = ShownStep::new(2, &[9]);
    steps.push(ShownStep { logits: LogitsRows::None, ..ShownStep::new(0, &[9]) });
    steps.push(ShownStep { logits: LogitsRows::All, ..mixed.clone() });
    steps.push(ShownStep { observed: true, ..mixed });
    steps.push(ShownStep { observed: true, ..ShownStep::new(8, &[]) });
    steps
}

/// A model of random weights, stored in its dtype.
fn model(config: &str, dtype: DType, options: LoadOptions, device: &Device) -> Box<dyn CausalLm> {
    stored_model(config, [dtype, dtype], options, device)
}

/// A model of random weights in a dtype, stored in another one.
fn stored_model(
    config: &str,
    [dtype, stored]: [DType; 2],
    options: LoadOptions,
    device: &Device,
) -> Box<dyn CausalLm> {
    let model = ALL.parse(&Config::parse(config, "config.json").unwrap()).unwrap();
    let layout = model.layout(&Geometry::default(), &|_| true).unwrap();
    let weights = DummyWeights::new(layout.tensors.clone(), 7).with_stored_dtype(stored);
    let vb = RankView::new(weights, layout.slices_for(device)).var_builder(dtype, device);
    model.load(&options, vb).unwrap().model
}

fn check(what: &str, model: &dyn CausalLm, ex: &Exec) {
    for shown in steps() {
        let mut context = StepContext { only_decode: shown.prompts.is_empty(), ..StepContext::default() };
        expect_explained(what, model, &shown, &mut context, ex).unwrap();
    }
}

#[test]
fn layers_launch_what_their_plans_say() {
    for dtype in [DType::BF16, DType::F32] {
        let model = model(QWEN, dtype, LoadOptions::default(), cuda().device());
        for invariant in [false, true] {
            let ex = cuda().with_batch_invariant(invariant).with_fp8_activations(Fp8Activations::On);
            check(&format!("{dtype:?}, invariant: {invariant}"), model.as_ref(), &ex);
        }
    }
}

#[test]
fn layers_of_linear_attention_launch_what_their_plans_say() {
    for dtype in [DType::BF16, DType::F32] {
        let model = model(HYBRID, dtype, LoadOptions::default(), cuda().device());
        for invariant in [false, true] {
            let ex = cuda().with_batch_invariant(invariant);
            check(&format!("{dtype:?}, invariant: {invariant}"), model.as_ref(), &ex);
        }
    }
}

/// A gate in f32 is widened rows and a product in f32, and no launch contains it.
#[test]
fn layers_with_a_gate_in_f32_launch_what_their_plans_say() {
    for path in [MoePath::Fused, MoePath::Legacy] {
        let options = LoadOptions { moe_path: Some(path), ..LoadOptions::default() };
        let model = stored_model(DEEPSEEK, [DType::BF16, DType::F32], options, cuda().device());
        for invariant in [false, true] {
            let ex = cuda().with_batch_invariant(invariant);
            let layers = model.plan(&PlanStep::decode(8), &ex.machine());
            let mut stages = layers.iter().flat_map(|layer| &layer.mlp);
            let has_note = stages.any(|stage| stage.note.as_deref() == Some("the gate in f32"));
            assert!(has_note, "{layers:?}");
            check(&format!("a gate in f32, {path:?}, invariant: {invariant}"), model.as_ref(), &ex);
        }
    }
}

#[test]
fn layers_of_latent_attention_launch_what_their_plans_say() {
    use SharedExpertsStream::{Auto, Off, On};
    for mla in [MlaForm::Absorbed, MlaForm::Naive] {
        for (path, stream) in
            [(MoePath::Fused, Auto), (MoePath::Fused, On), (MoePath::Fused, Off), (MoePath::Legacy, Off)]
        {
            for invariant in [false, true] {
                let context = BlockContext { shared_experts_stream: stream, ..BlockContext::default() };
                let options =
                    LoadOptions { mla: Some(mla), moe_path: Some(path), context, ..LoadOptions::default() };
                let model = model(DEEPSEEK, DType::BF16, options, cuda().device());
                let ex = cuda().with_batch_invariant(invariant);
                let what = format!("{mla:?}, {path:?}, {stream:?}, invariant: {invariant}");
                check(&what, model.as_ref(), &ex);
            }
        }
    }
}
