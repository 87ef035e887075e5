//! The plan of a sparse layer: which launches compute router, experts and sum in a step, what around them is fused with
//! them, and why nothing faster runs.
//!
//! A plan is a pure function of the layer's parts, the step and the machine. The layer executes what the same function
//! says, so an explanation cannot differ from what runs.

use moe_dispatch::Combine;
use moe_experts::Experts;
use moe_kernels::plan::{
    CopiesCall, CopiesForm, ExpertsCall, ExpertsForm, Form, Fusion, Machine, MonolithicCall, Reason,
    Rejected, RouterCall, RouterForm, Stage,
};
use moe_kernels::{WeightAndReduce, max_passes};

use crate::block::SparseMoeBlock;
use crate::chunked::Path;

/// What a step asks of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanStep {
    /// Rows T, padding included.
    pub rows: usize,
    /// Whether row i is the one new row of sequence i, as in pure decoding.
    pub one_row_each: bool,
    /// What the step wants to see or to force inside the layer, if anything.
    pub observed: Option<&'static str>,
}

/// Which experts compute a layer's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoeForm {
    /// The monolithic experts of this number, with what is fused around them.
    Monolithic {
        /// Place among the layer's monolithic experts.
        index: usize,
        /// What is fused.
        fusion: Fusion,
    },
    /// Router, dispatch, experts and combine one after the other.
    Modular,
}

impl MoeForm {
    /// What of the layer around the experts is computed in their launches.
    pub fn fusion(self) -> Fusion {
        match self {
            Self::Monolithic { fusion, .. } => fusion,
            Self::Modular => Fusion::Nothing,
        }
    }
}

/// The plan of a sparse layer for a step.
#[derive(Clone, Debug, PartialEq)]
pub struct MoePlan {
    /// What runs.
    pub form: MoeForm,
    /// Its kernels in their order.
    pub stages: Vec<Stage>,
}

impl SparseMoeBlock {
    /// What computes the layer in such a step, where the caller lets the launches contain what is in `fusions`.
    pub fn choose(&self, step: &PlanStep, fusions: &[Fusion], machine: &Machine) -> MoeForm {
        let forms = self.monolithic_forms(fusions);
        let mut fitting = forms.filter(|form| self.fits(*form, step, machine).is_ok());
        fitting.next().map_or(MoeForm::Modular, |(index, fusion)| MoeForm::Monolithic { index, fusion })
    }

    /// [`choose`](Self::choose), explained.
    pub fn plan(&self, step: &PlanStep, fusions: &[Fusion], machine: &Machine) -> MoePlan {
        let form = self.choose(step, fusions, machine);
        let mut rejected = Vec::new();
        for (index, fusion) in self.monolithic_forms(fusions) {
            match self.fits((index, fusion), step, machine) {
                // Nobody asks of floats why they are not quantised.
                Err(Reason::Floats) => {}
                Err(reason) => {
                    let kernel = format!("{}{}", self.monolithic()[index].name(), around(fusion));
                    rejected.push(Rejected { kernel, reason });
                }
                Ok(()) => break,
            }
        }
        let mut stages = match form {
            MoeForm::Monolithic { index, fusion } => {
                let computes: &[&str] = match fusion {
                    Fusion::Nothing => &["router", "experts", "combine"],
                    Fusion::NormAdd => &["norm", "router", "experts", "combine", "add"],
                    Fusion::AddNorm => &["router", "experts", "combine", "add", "next norm"],
                };
                vec![Stage { computes, kernel: self.monolithic()[index].name().to_string(), rejected }]
            }
            MoeForm::Modular => self.modular_stages(step, rejected, machine),
        };
        if let Some(shared) = self.shared_experts() {
            stages.extend(shared.stages(step.rows, machine));
        }
        MoePlan { form, stages }
    }

    /// Monolithic experts with what may be fused around them, in the order of trial.
    fn monolithic_forms(&self, fusions: &[Fusion]) -> impl Iterator<Item = (usize, Fusion)> {
        let count = self.monolithic().len();
        fusions.iter().flat_map(move |fusion| (0..count).map(|index| (index, *fusion)))
    }

    /// Whether monolithic experts compute such a step, or the first reason why not.
    fn fits(
        &self,
        (index, fusion): (usize, Fusion),
        step: &PlanStep,
        machine: &Machine,
    ) -> Result<(), Reason> {
        let (path, experts) = (self.path(), &self.monolithic()[index]);
        let call =
            MonolithicCall { experts: self.call(path, step.rows), dtype: experts.shape().dtype, fusion };
        experts.fits(&call, machine)?;
        if let Some(asked) = step.observed {
            return Err(Reason::Routed { asked });
        }
        self.router().kernel_rule()?;
        let copies = self.placed_experts().zip(self.copies_form(path, step.rows, machine));
        if copies.is_some_and(|(placed, form)| placed.is_near(form)) {
            return Err(Reason::Part { part: "copies of experts near each row's rank" });
        }
        if self.chunk_size().is_some_and(|size| step.rows > size.get()) {
            return Err(Reason::Part { part: "chunks of tokens" });
        }
        let whole = path.prepare.combine() == Combine::Here && path.prepare.local_experts().is_none();
        match fusion {
            _ if !path.prepare.combine().is_local() || self.has_decode_path() => {
                Err(Reason::Part { part: "dispatch over ranks" })
            }
            Fusion::NormAdd | Fusion::AddNorm if !whole => {
                Err(Reason::Part { part: "the sum over ranks between experts and addition" })
            }
            _ if fusion != Fusion::Nothing && self.shared_experts().is_some() => {
                Err(Reason::Part { part: "shared experts" })
            }
            _ => Ok(()),
        }
    }

    /// Which copies of experts compute a step of `rows` rows by a path; `None` where no map places experts.
    pub(crate) fn copies_form(&self, path: &Path, rows: usize, machine: &Machine) -> Option<CopiesForm> {
        CopiesForm::choose(&self.copies_call(path, rows)?, machine)
    }

    fn copies_call(&self, path: &Path, rows: usize) -> Option<CopiesCall> {
        let (experts, _) = self.placed_experts()?.sizes();
        let (tokens, top_k) = (path.prepare.max_rows(rows), self.router().config().num_slots());
        Some(CopiesCall { tokens, top_k, experts, quant: path.experts.quantisation() })
    }

    /// Which copies compute, and the launch that says which copy computes a row: the router's if it can.
    fn copies_stage(&self, path: &Path, rows: usize, in_router: bool, machine: &Machine) -> Option<Stage> {
        let (placed, call) = (self.placed_experts()?, self.copies_call(path, rows)?);
        let mut stage = CopiesForm::stage(&["copies of experts"], &call, machine);
        let near = self.copies_form(path, rows, machine).is_some_and(|form| placed.is_near(form));
        let launch = if in_router && !near { "in the router's launch" } else { "a launch of its own" };
        stage.kernel = format!("{}, {launch}", stage.kernel);
        Some(stage)
    }

    /// The sizes of a step of `rows` rows, as many as arrive.
    fn call(&self, path: &Path, rows: usize) -> ExpertsCall {
        let (config, shape) = (self.router().config(), path.experts.shape());
        let tokens = path.prepare.max_rows(rows);
        let passes = |slots| max_passes(shape.num_local_experts, slots, tokens * config.num_slots());
        ExpertsCall {
            tokens,
            top_k: config.num_slots(),
            num_ids: match self.placed_experts() {
                Some(placed) => placed.sizes().1,
                None => config.num_experts + config.num_fused_shared_experts,
            },
            num_local: path.experts.num_slots().unwrap_or(shape.num_local_experts),
            passes: path.experts.num_slots().map_or(1, passes),
            hidden: shape.hidden_size,
            inter: shape.intermediate_size,
            quant: path.experts.quantisation(),
        }
    }

    /// The kernels of router, dispatch, experts and combine one after the other.
    fn modular_stages(&self, step: &PlanStep, rejected: Vec<Rejected>, machine: &Machine) -> Vec<Stage> {
        let (config, path) = (self.router().config(), self.path_of(step.one_row_each));
        let (shape, prepare) = (path.experts.shape(), &path.prepare);
        let router = RouterCall {
            hidden: shape.hidden_size,
            experts: config.num_experts + config.num_fused_shared_experts,
            top_k: config.num_slots(),
            dtype: shape.dtype,
        };
        let mut gate = RouterForm::stage(&["router"], &router, machine);
        let asked = step.observed.map(|asked| Reason::Routed { asked });
        if let Some(reason) = asked.or(self.router().kernel_rule().err()).filter(|_| machine.gpu.is_some()) {
            let kernel = RouterForm::OneLaunch.name().to_string();
            let rejected = vec![Rejected { kernel, reason }];
            gate = Stage { computes: &["router"], kernel: RouterForm::Apart.name().into(), rejected };
        }
        gate.rejected.splice(0..0, rejected);
        let mut experts = experts_stage(path.experts.as_ref(), &self.call(path, step.rows), machine);
        experts.kernel = format!("{} ({})", experts.kernel, path.experts.name());
        let one = |computes, kernel: &str| Stage { computes, kernel: kernel.into(), rejected: Vec::new() };
        let in_router = gate.kernel == RouterForm::OneLaunch.name();
        let mut stages = vec![gate];
        stages.extend(self.copies_stage(path, step.rows, in_router, machine));
        stages.push(one(&["dispatch"], prepare.name()));
        if path.experts.num_slots().is_some() {
            let passes = self.call(path, step.rows).passes;
            let kernel =
                format!("expert_residency, expert_exchange (up to {passes} times with the products)");
            stages.push(one(&["experts from host memory"], &kernel));
        }
        stages.push(experts);
        if path.experts.weight_and_reduce() != WeightAndReduce::NoOp {
            stages.push(one(&["combine"], "weighted sum"));
        }
        stages
    }
}

/// The kernels behind modular experts: a choice for each step where they weight and reduce by themselves.
fn experts_stage(experts: &dyn Experts, call: &ExpertsCall, machine: &Machine) -> Stage {
    match experts.weight_and_reduce() {
        WeightAndReduce::NoOp => ExpertsForm::stage(&["experts", "combine"], call, machine),
        _ => Stage { computes: &["experts"], kernel: experts.products().into(), rejected: Vec::new() },
    }
}

fn around(fusion: Fusion) -> &'static str {
    match fusion {
        Fusion::Nothing => "",
        Fusion::NormAdd => " with norm and addition",
        Fusion::AddNorm => " with addition and next norm",
    }
}
