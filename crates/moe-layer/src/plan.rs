//! The plan of a sparse layer: which launches compute router, experts and sum in a step, which ops before and after
//! them are fused with them, and why nothing faster runs.
//!
//! A plan depends only on the layer's parts, the step and the machine. The layer executes the form that the same
//! function chooses. `tests/suite/explained.rs` checks that the layer launches what the plan lists.

use moe_dispatch::Combine;
use moe_kernels::plan::{
    CopiesCall, CopiesForm, EXPERTS_FROM_HOST, ExpertsCall, ExpertsForm, Form, Fusion, Machine,
    MonolithicCall, Reason, Rejected, RouterCall, RouterForm, Stage, in_parts,
};
use moe_kernels::{PHYSICAL_IDS, WeightAndReduce, max_passes};

use crate::block::SparseMoeBlock;
use crate::chunked::{COMBINE_ADD_NORM, Path};
use crate::form::MoeForm;
use crate::plan_step::PlanStep;

impl SparseMoeBlock {
    /// Chooses the form that computes the layer in this step. `fusions` are the ops around the layer that its launches
    /// may contain.
    pub fn choose(&self, step: &PlanStep, fusions: &[Fusion], machine: &Machine) -> MoeForm {
        let forms = self.monolithic_forms(fusions);
        let mut fitting = forms.filter(|form| self.fits(*form, step, machine).is_ok());
        match fitting.next() {
            Some((index, fusion)) => MoeForm { monolithic: Some(index), fusion },
            None if fusions.contains(&Fusion::AddNorm) && self.adds_norm() => {
                MoeForm::modular(Fusion::AddNorm)
            }
            None => MoeForm::modular(Fusion::Nothing),
        }
    }

    /// Returns the kernels of a form that [`choose`](Self::choose) returned for this step and `fusions`, and why faster
    /// ones do not run.
    pub fn stages(
        &self,
        form: MoeForm,
        step: &PlanStep,
        fusions: &[Fusion],
        machine: &Machine,
    ) -> Vec<Stage> {
        let mut rejected = Vec::new();
        for (index, fusion) in self.monolithic_forms(fusions) {
            match self.fits((index, fusion), step, machine) {
                // That floats are not quantised is obvious and not worth a line.
                Err(Reason::Floats) => {}
                Err(reason) => {
                    let kernel = format!("{}{}", self.monolithic[index].name(), fusion.suffix());
                    rejected.push(Rejected { kernel, reason });
                }
                Ok(()) => break,
            }
        }
        let MoeForm { monolithic, fusion } = form;
        match monolithic {
            Some(index) => {
                let computes: &[&str] = match fusion {
                    Fusion::Nothing => &["router", "experts", "combine"],
                    Fusion::Add => &["router", "experts", "combine", "add"],
                    Fusion::NormAdd => &["norm", "router", "experts", "combine", "add"],
                    Fusion::AddNorm => &["router", "experts", "combine", "add", "next norm"],
                };
                let stage = Stage::new(computes, self.monolithic[index].name()).after(rejected);
                self.with_shared(step.rows, vec![stage], machine)
            }
            None => {
                let adds_norm = fusion == Fusion::AddNorm;
                let mut stages = self.router_stages(step, machine);
                stages[0].rejected.splice(0..0, rejected);
                let path = self.path_of(step.only_decode);
                let near = self.is_near(path, step.rows, machine);
                let chunks = path.chunks(step.rows, self.chunk_size());
                stages.extend(in_parts(&chunks, |rows| {
                    self.chunk_stages(path, rows, near, adds_norm, machine)
                }));
                stages
            }
        }
    }

    /// Whether modular experts should also compute the norm after the layer: if their sums return from other ranks, and
    /// nothing else is added.
    pub(crate) fn adds_norm(&self) -> bool {
        let alone = self.router().config().num_zero_experts == 0 && self.shared.is_none();
        let returns = |path: &Path| path.prepare.combine() == Combine::ByRank;
        alone && [false, true].map(|only_decode| self.path_of(only_decode)).into_iter().all(returns)
    }

    /// The stages of the routed experts, and the stages of the shared ones.
    fn with_shared(&self, rows: usize, routed: Vec<Stage>, machine: &Machine) -> Vec<Stage> {
        match &self.shared {
            Some(shared) => shared.stages(rows, routed, machine),
            None => routed,
        }
    }

    /// Monolithic experts with what may be fused around them, in the order of trial.
    fn monolithic_forms(&self, fusions: &[Fusion]) -> impl Iterator<Item = (usize, Fusion)> {
        let count = self.monolithic.len();
        fusions.iter().flat_map(move |fusion| (0..count).map(|index| (index, *fusion)))
    }

    /// Whether monolithic experts compute this step, or the first reason why not.
    fn fits(
        &self,
        (index, fusion): (usize, Fusion),
        step: &PlanStep,
        machine: &Machine,
    ) -> Result<(), Reason> {
        let path = &self.path;
        let experts = &self.monolithic[index];
        let call = MonolithicCall {
            experts: self.call(path, step.rows),
            dtype: experts.shape().dtype,
            gate: self.gate.dtype(),
            fusion,
        };
        experts.fits(&call, machine)?;
        if let Some(asked) = step.asks() {
            return Err(Reason::Routed { asked });
        }
        self.router().kernel_rule()?;
        if self.is_near(path, step.rows, machine) {
            return Err(Reason::Part { part: "copies of experts near each row's rank" });
        }
        if self.chunk_size().is_some_and(|size| step.rows > size.get()) {
            return Err(Reason::Part { part: "chunks of tokens" });
        }
        if !path.prepare.combine().is_local() || self.decode.is_some() {
            return Err(Reason::Part { part: "dispatch over ranks" });
        }
        if fusion == Fusion::Nothing {
            return Ok(());
        }
        if path.prepare.combine() != Combine::Here || path.prepare.local_experts().is_some() {
            return Err(Reason::Part { part: "the sum over ranks between experts and addition" });
        }
        match self.shared {
            Some(_) => Err(Reason::Part { part: "shared experts" }),
            None => Ok(()),
        }
    }

    /// Which copies of experts compute a step of `rows` rows on a path; `None` if no map places experts.
    pub(crate) fn copies_form(&self, path: &Path, rows: usize, machine: &Machine) -> Option<CopiesForm> {
        CopiesForm::choose(&self.copies_call(path, rows)?, machine)
    }

    fn copies_call(&self, path: &Path, rows: usize) -> Option<CopiesCall> {
        let (experts, _) = self.placed_experts()?.sizes();
        let tokens = path.prepare.max_rows(rows);
        let top_k = self.router().config().num_slots();
        Some(CopiesCall { tokens, top_k, experts, quant: path.experts.quantisation() })
    }

    /// Whether the copy that computes a row depends on its rank.
    fn is_near(&self, path: &Path, rows: usize, machine: &Machine) -> bool {
        let copies = self.placed_experts().zip(self.copies_form(path, rows, machine));
        copies.is_some_and(|(placed, form)| placed.is_near(form))
    }

    /// The stage that chooses copies, if a map places experts.
    fn copies_stage(&self, path: &Path, rows: usize, machine: &Machine) -> Option<Stage> {
        let copies = CopiesForm::stage(&["copies of experts"], &self.copies_call(path, rows)?, machine);
        Some(Stage { note: Some(copies.kernel), kernel: PHYSICAL_IDS.to_string(), ..copies })
    }

    /// The sizes of a step of `rows` rows, all of which arrive on this rank.
    fn call(&self, path: &Path, rows: usize) -> ExpertsCall {
        let config = self.router().config();
        let shape = path.experts.shape();
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
            epilogue: path.experts.epilogue(),
        }
    }

    /// Returns the kernels that route all rows of a step and choose the copies of experts.
    fn router_stages(&self, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        let config = self.router().config();
        let path = self.path_of(step.only_decode);
        let shape = path.experts.shape();
        let router = RouterCall {
            hidden: shape.hidden_size,
            experts: config.num_experts + config.num_fused_shared_experts,
            top_k: config.num_slots(),
            dtype: shape.dtype,
            gate: self.gate.dtype(),
        };
        let mut gate = RouterForm::stage(&["router"], &router, machine);
        let asked = step.routed.map(|asked| Reason::Routed { asked });
        if let Some(reason) = asked.or(self.router().kernel_rule().err()).filter(|_| machine.gpu.is_some()) {
            let kernel = RouterForm::OneLaunch.name().to_string();
            gate = Stage::new(&["router"], RouterForm::Apart.name()).after([Rejected { kernel, reason }]);
        }
        if router.gate != router.dtype {
            gate.note = Some("the gate in f32".to_string());
        }
        let near = self.is_near(path, step.rows, machine);
        let Some(copies) = self.copies_stage(path, step.rows, machine).filter(|_| !near) else {
            return vec![gate];
        };
        if gate.kernel != RouterForm::OneLaunch.name() {
            return vec![gate, copies];
        }
        gate.rejected.extend(copies.rejected);
        vec![Stage { computes: &["router", "copies of experts"], note: copies.note, ..gate }]
    }

    /// Returns the kernels that compute a chunk of `rows` routed rows.
    fn chunk_stages(
        &self,
        path: &Path,
        rows: usize,
        near: bool,
        adds_norm: bool,
        machine: &Machine,
    ) -> Vec<Stage> {
        let mut stages = Vec::new();
        stages.extend(self.copies_stage(path, rows, machine).filter(|_| near));
        let shape = path.experts.shape();
        let top_k = self.router().config().num_slots();
        let counts = vec![rows; path.prepare.num_dispatchers()];
        let dispatch = path.prepare.dispatch_kernel(&counts, top_k, shape.hidden_size, shape.dtype);
        let mut routed = vec![Stage::new(&["dispatch"], dispatch)];
        if adds_norm && path.prepare.combines_counts(&counts, top_k, shape.hidden_size, shape.dtype) {
            routed.extend(self.slot_rows_stages(path, rows, machine));
            routed
                .push(Stage::new(&["combine", "sums to their owners", "add", "next norm"], COMBINE_ADD_NORM));
        } else {
            routed.extend(self.experts_stages(path, rows, machine));
            routed.extend(path.end());
            if adds_norm {
                routed.push(Stage::new(&["add", "next norm"], "add_rms_norm"));
            }
        }
        if self.router().config().num_zero_experts > 0 {
            routed.push(Stage::new(&["zero experts"], "add_scaled"));
        }
        stages.extend(self.with_shared(rows, routed, machine));
        stages
    }

    /// Returns the kernels of modular experts. Experts that weight and reduce choose them for each step.
    fn experts_stages(&self, path: &Path, rows: usize, machine: &Machine) -> Vec<Stage> {
        let experts = &path.experts;
        let call = self.call(path, rows);
        let note = Some(experts.name().to_string());
        if experts.weight_and_reduce() != WeightAndReduce::NoOp {
            return vec![Stage { note, ..Stage::new(&["experts"], experts.products()) }];
        }
        if call.num_local == 0 {
            return Vec::new();
        }
        let products = ExpertsForm::stage(&["experts", "combine"], &call, machine);
        let mut stages = vec![Stage { note, ..products }];
        if experts.num_slots().is_some() {
            let note = Some(format!("up to {} times with the products", call.passes));
            stages.insert(0, Stage { note, ..Stage::new(&["experts from host memory"], EXPERTS_FROM_HOST) });
        }
        stages
    }

    /// Returns the kernels of experts that may leave the sum of their slots to the next launch.
    fn slot_rows_stages(&self, path: &Path, rows: usize, machine: &Machine) -> Vec<Stage> {
        let mut stages = self.experts_stages(path, rows, machine);
        let leaves = path.experts.num_slots().is_none() && self.call(path, rows).leaves_slots(machine);
        if let Some(products) = stages.first_mut().filter(|_| leaves) {
            products.computes = &["experts"];
        }
        stages
    }
}
