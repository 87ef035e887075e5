//! Makes monolithic experts of the launches in moe-kernels that contain the router.

use candle_core::Result;
use moe_kernels::plan::{BULK_COPIES, Form, Machine, MonolithicCall, MonolithicForm, Reason, Target};
use moe_kernels::{Activation, Exec, ExpertsSpec, Gate, SublayerIo, View};

use crate::capability::Capability;
use crate::experts::MonolithicExperts;
use crate::oracle::{Backend, CUDA_FUSED};
use crate::weights::{ExpertWeights, ExpertsShape};

/// The abilities of these kernels: SwiGLU experts with bf16 activations, plain ones or gpt-oss's, whole or cut along
/// their intermediate size.
const CAPABILITY: Capability =
    Capability { target: Target::Tuned(BULK_COPIES), tensor_parallel: true, ..CUDA_FUSED };

/// One of the monolithic kernels over the packed weights of a layer.
#[derive(Clone, Debug)]
pub struct MonolithicKernels {
    form: MonolithicForm,
    weights: ExpertWeights,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    activation: Activation,
    shape: ExpertsShape,
    unsupported: Option<Reason>,
}

impl MonolithicKernels {
    /// Returns every monolithic kernel over these weights, in the order in which they are tried. If a kernel does not
    /// support `spec`, or if the user named another backend (`asked`), its [`fits`](MonolithicExperts::fits) returns
    /// the reason.
    pub fn all(spec: &ExpertsSpec, weights: &ExpertWeights, asked: Option<&str>) -> Vec<Self> {
        let supported = match asked.and_then(|name| name.parse::<Backend>().ok()) {
            Some(backend) if backend != Backend::CudaFused => {
                Err(Reason::NotRequested { requested: backend.name() })
            }
            _ if spec.apply_router_weight_on_input => Err(Reason::RouterWeightOnInput),
            _ => CAPABILITY.check(spec),
        };
        let of = |form: &MonolithicForm| Self {
            form: *form,
            weights: weights.clone(),
            activation: spec.activation,
            shape: weights.shape(),
            unsupported: supported.clone().err(),
        };
        MonolithicForm::ALL.iter().map(of).collect()
    }
}

impl MonolithicExperts for MonolithicKernels {
    fn name(&self) -> &str {
        self.form.name_of(self.weights.quantisation().map(|[w13, _]| w13))
    }

    fn shape(&self) -> ExpertsShape {
        self.shape
    }

    fn fits(&self, call: &MonolithicCall, machine: &Machine) -> std::result::Result<(), Reason> {
        match &self.unsupported {
            Some(reason) => Err(reason.clone()),
            None => self.form.fits(call, machine),
        }
    }

    #[cfg(feature = "cuda")]
    fn apply(
        &self,
        gate: &Gate<'_>,
        expert_map: Option<View<'_>>,
        io: SublayerIo<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        use moe_kernels::TensorView;
        use moe_kernels::cuda::{ExpertEpilogue, MonolithicExperts as Args, monolithic_experts_into};
        let w13 = self.weights.w13().read()?;
        let w2 = self.weights.w2().read()?;
        let biases = self.weights.bias_views()?;
        let [w13_bias, w2_bias] = biases.each_ref().map(Option::as_ref);
        let w13_bias = w13_bias.map(TensorView::view).transpose()?;
        let w2_bias = w2_bias.map(TensorView::view).transpose()?;
        let epilogue = ExpertEpilogue { w13_bias, w2_bias, activation: self.activation };
        let args = Args { gate, w13: w13.view()?, w2: w2.view()?, expert_map, epilogue };
        monolithic_experts_into(self.form, &args, io, ex)
    }

    #[cfg(not(feature = "cuda"))]
    fn apply(&self, _: &Gate<'_>, _: Option<View<'_>>, _: SublayerIo<'_>, _: &mut Exec) -> Result<()> {
        candle_core::bail!("{}: these experts need a build with the feature `cuda`", self.name())
    }
}
