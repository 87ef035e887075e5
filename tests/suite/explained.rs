//! The explanations are correct: on any number of ranks each layer launches the kernels in its plan, by name.

use std::sync::Arc;

use candle_core::{DType, Result};
use model_runtime::{
    CausalLm, Exec, KvCache, LayerPlan, LogitsOut, LogitsRows, MlaForm, ModelInfo, Observer, StepContext,
    StepViews,
};
use moe_comm::{ParallelConfig, SelfComm, ThreadComm};
use moe_layer::{Machine, MoePath, PlanStep};
use moe_tests::explained::{ShownStep, expect_explained};

use crate::geometries::{Case, Origin, STRIDE, backends};

/// Decoding, prompts, and both in one step, with numbers of rows for which some device uses different forms.
fn steps() -> Vec<ShownStep> {
    let mut steps = Vec::new();
    for rows in [1, 2, 8, 64, 300] {
        steps.push(ShownStep::new(rows, &[]));
        steps.push(ShownStep::new(0, &[rows]));
    }
    steps.extend([
        ShownStep::new(1, &[1]),
        ShownStep::new(3, &[7, 5]),
        ShownStep::new(8, &[56]),
        ShownStep::new(64, &[236]),
    ]);
    let mixed = ShownStep::new(2, &[9]);
    steps.push(ShownStep { logits: LogitsRows::None, ..ShownStep::new(0, &[9]) });
    steps.push(ShownStep { logits: LogitsRows::All, ..mixed.clone() });
    steps.push(ShownStep { observed: true, ..mixed });
    steps
}

fn context(shown: &ShownStep, ranks: usize) -> StepContext {
    StepContext {
        rank_tokens: (ranks > 1).then(|| vec![shown.rows(); ranks].into()),
        only_decode: shown.prompts.is_empty(),
        ..StepContext::default()
    }
}

/// Checks all steps of a case on all of its ranks.
fn check(case: &Case, steps: &[ShownStep]) {
    let origin = Origin::open(case.model);
    let ranks = case.parallel.world_size().unwrap();
    let what = format!("{case:?}");
    let run = |comm: ThreadComm| {
        let ex = Exec::cpu().with_threads(1).unwrap();
        let model = origin.load_rank(case, Arc::new(comm), &ex).unwrap();
        let model: &dyn CausalLm = model.as_ref();
        for shown in steps {
            let mut context = context(shown, ranks);
            expect_explained(&what, model, shown, &mut context, &ex).unwrap();
        }
    };
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            ThreadComm::world(ranks).into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}

fn one_rank(model: &'static str) -> Case {
    Case::new(model, DType::F32, ParallelConfig::default())
}

#[test]
fn layers_of_one_rank_launch_what_their_plans_say() {
    for model in ["f32", "mlp-only-layers", "attention-bias", "olmoe", "mixtral-window"] {
        for chunk in [None, Some(1), Some(7)] {
            check(&Case { chunk, ..one_rank(model) }, &steps());
        }
    }
    check(&Case::new("base", DType::BF16, ParallelConfig::default()), &steps());
    check(&Case::new("qwen3-next", DType::BF16, ParallelConfig::default()), &steps());
}

#[test]
fn layers_of_latent_attention_launch_what_their_plans_say() {
    for model in ["deepseek-v2", "deepseek-v2-lite", "deepseek-layer-freq", "deepseek-no-shared-saved"] {
        for mla in [MlaForm::Absorbed, MlaForm::Naive] {
            for path in [MoePath::Fused, MoePath::Legacy] {
                let case = Case { mla: Some(mla), path: Some(path), ..one_rank(model) };
                check(&case, &steps());
                check(&Case { chunk: Some(7), ..case }, &steps());
            }
        }
    }
}

#[test]
fn layers_over_ranks_launch_what_their_plans_say() {
    for model in ["base", "mlp-only-layers", "olmoe", "deepseek-v2-lite", "qwen3-next"] {
        let origin = Origin::open(model);
        let ways = backends().into_iter().filter(|parallel| {
            let ranks = parallel.world_size().unwrap();
            (ranks == 2 || ranks == 4) && origin.fits(parallel)
        });
        for parallel in ways.step_by(STRIDE) {
            for chunk in [None, Some(7)] {
                let case = Case { chunk, ..Case::new(model, DType::BF16, parallel) };
                check(&case, &steps());
            }
        }
    }
}

/// A model whose plan leaves out the last kernel.
struct Forgets(Box<dyn CausalLm>);

impl CausalLm for Forgets {
    fn info(&self) -> &ModelInfo {
        self.0.info()
    }

    fn plan(&self, step: &PlanStep, machine: &Machine) -> Vec<LayerPlan> {
        let mut plans = self.0.plan(step, machine);
        if let Some(last) = plans.last_mut() {
            last.mlp.pop();
        }
        plans
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: LogitsOut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        self.0.forward(step, kv, logits, observer, context, ex)
    }
}

#[test]
#[should_panic(expected = "layer 1 launched the first, its plan says the second")]
fn the_comparison_can_fail() {
    let case = one_rank("f32");
    let ex = Exec::cpu().with_threads(1).unwrap();
    let model = Origin::open(case.model).load_rank(&case, Arc::new(SelfComm::new()), &ex).unwrap();
    let shown = ShownStep::new(2, &[]);
    expect_explained("a plan", &Forgets(model), &shown, &mut context(&shown, 1), &ex).unwrap();
}
