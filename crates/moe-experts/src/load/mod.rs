//! Loading expert weights from a checkpoint straight into the packs.
//!
//! A large model is mostly experts, so this is where its load time and its peak memory are
//! decided: every pack is allocated once, untouched, and filled by all threads; each holds one
//! checkpoint tensor at a time, copies the rows of this rank and drops it.

use candle_core::{Device, Result, Tensor};
use candle_nn::VarBuilder;
use moe_kernels::names::MlpNames;
use moe_kernels::{Float, TensorView, gradient, with_float};
use rayon::prelude::*;

mod spec;
mod unread;

pub use spec::LoadSpec;

use crate::weights::ExpertWeights;

impl ExpertWeights {
    /// Loads the experts of this rank, in the dtype (f32, bf16 or f16) and onto the device of
    /// `vb`. Three layouts are known: this rank's packs are taken if `w13` is present, else the packed
    /// one if `gate_up_proj` is.
    ///
    /// | layout | tensor | shape |
    /// |---|---|---|
    /// | per expert | `{id}.gate_proj.weight`, `{id}.up_proj.weight` | [I, H] |
    /// | | `{id}.down_proj.weight` | [H, I] |
    /// | | with biases: `{id}.gate_proj.bias`, `{id}.up_proj.bias`, `{id}.down_proj.bias` | `[I]`, `[I]`, `[H]` |
    /// | packed | `gate_up_proj` | [E, 2I, H], gate rows, then up rows |
    /// | | `down_proj` | [E, H, I] |
    /// | | with biases: `gate_up_proj_bias`, `down_proj_bias` | [E, 2I], [E, H] |
    /// | this rank's | `w13`, `w2`; with biases: `w13_bias`, `w2_bias` | see [`ExpertWeights`] |
    ///
    /// Other names are told by [`LoadSpec::with_names`]. Per-expert tensors are read by all
    /// threads, one at a time each, straight into the packs; experts of other ranks are not read.
    /// A packed tensor becomes the pack itself where this rank holds all of it; otherwise it is in
    /// memory as a whole while this rank's part is copied, because a `VarBuilder` reads whole
    /// tensors. A source that can read parts shows this rank's packs instead. The down bias is not split by tensor parallelism: the code that adds the ranks' partial
    /// sums adds it once.
    ///
    /// # Errors
    /// A `spec` that contradicts itself; a missing tensor or one of another shape, by name; another
    /// dtype. Sizes that the checkpoint does not have are refused before a pack is allocated. So are tensors that `spec` does
    /// not ask for ([`LoadSpec::refuse_unread`]).
    pub fn load(spec: &LoadSpec, vb: VarBuilder) -> Result<Self> {
        spec.check()?;
        spec.refuse_unread(&vb)?;
        if !spec.one_by_one && vb.contains_tensor(Pack::W13.local_name()) {
            return Self::load_local(spec, &vb);
        }
        if spec.one_by_one && !vb.device().is_cpu() && !vb.contains_tensor(spec.names.packed_gate_up) {
            return Self::load_on_device(spec, &vb);
        }
        let device = vb.device().clone();
        let on_device = vb.clone();
        let vb = vb.set_device(Device::Cpu);
        let dtype = vb.dtype();
        let loader = Loader { spec, packed: vb.contains_tensor(spec.names.packed_gate_up), vb };
        let load = |pack: Pack| -> Result<Tensor> {
            // A whole pack on a device comes from the checkpoint (or is made) without a stop here.
            if loader.packed && spec.is_whole() && !device.is_cpu() && spec.num_local() > 0 {
                let mut dims = pack.expert_dims(spec.hidden_size, spec.intermediate_size);
                dims.insert(0, spec.num_experts);
                return on_device.get(dims, &pack.name(&spec.names))?.contiguous();
            }
            let tensor = with_float!(dtype, "load experts", T => loader.load::<T>(pack))?;
            tensor.to_device(&device)
        };
        loader.probe()?;
        let w13 = load(Pack::W13)?;
        let w2 = load(Pack::W2)?;
        let bias = |pack| spec.has_bias.then(|| load(pack)).transpose();
        Self::new(w13, w2, bias(Pack::W13Bias)?, bias(Pack::W2Bias)?)
    }

    /// The experts' own tensors, each to the device without a stop on the host; beside a pack its parts are there for a moment.
    fn load_on_device(spec: &LoadSpec, vb: &VarBuilder) -> Result<Self> {
        let load = |pack: Pack| -> Result<Tensor> {
            let h = spec.hidden_size;
            let i = spec.width();
            let names = pack.tensors(&spec.names);
            let (tensor, _) = pack.tensor_dims(h, i);
            let slots = (0..spec.num_local()).flat_map(|slot| names.iter().map(move |name| (slot, name)));
            let get = |(slot, name)| vb.get(&tensor[..], &format!("{}.{name}", spec.expert(slot)));
            let parts = slots.map(get).collect::<Result<Vec<_>>>()?;
            let dims = [&[spec.num_local()], &pack.expert_dims(h, i)[..]].concat();
            match parts.is_empty() {
                true => Tensor::zeros(dims, vb.dtype(), vb.device()),
                false => Tensor::cat(&parts, 0)?.reshape(dims),
            }
        };
        let bias = |pack| spec.has_bias.then(|| load(pack)).transpose();
        Self::new(load(Pack::W13)?, load(Pack::W2)?, bias(Pack::W13Bias)?, bias(Pack::W2Bias)?)
    }

    /// The packs as the source shows them.
    fn load_local(spec: &LoadSpec, vb: &VarBuilder) -> Result<Self> {
        let load = |pack: Pack| {
            let mut dims = pack.expert_dims(spec.hidden_size, spec.width());
            dims.insert(0, spec.num_local());
            vb.get(dims, pack.local_name())?.contiguous()
        };
        let bias = |pack| spec.has_bias.then(|| load(pack)).transpose();
        Self::new(load(Pack::W13)?, load(Pack::W2)?, bias(Pack::W13Bias)?, bias(Pack::W2Bias)?)
    }
}

#[derive(Clone, Copy)]
enum Pack {
    W13,
    W2,
    W13Bias,
    W2Bias,
}

impl Pack {
    /// Name in the packed layout.
    fn name(self, names: &MlpNames) -> String {
        match self {
            Self::W13 => names.packed_gate_up.to_string(),
            Self::W2 => names.packed_down.to_string(),
            Self::W13Bias => format!("{}_bias", names.packed_gate_up),
            Self::W2Bias => format!("{}_bias", names.packed_down),
        }
    }

    /// Name where this rank's packs are shown.
    fn local_name(self) -> &'static str {
        match self {
            Self::W13 => "w13",
            Self::W2 => "w2",
            Self::W13Bias => "w13_bias",
            Self::W2Bias => "w2_bias",
        }
    }

    /// Dims of one expert, for an intermediate size of `i`.
    fn expert_dims(self, h: usize, i: usize) -> Vec<usize> {
        match self {
            Self::W13 => vec![2 * i, h],
            Self::W2 => vec![h, i],
            Self::W13Bias => vec![2 * i],
            Self::W2Bias => vec![h],
        }
    }

    /// Names of an expert's own tensors, which lie one after the other in the pack.
    fn tensors(self, names: &MlpNames) -> Vec<String> {
        let of = |ending: &str, matrices: &[&str]| {
            matrices.iter().map(|name| format!("{name}.{ending}")).collect()
        };
        match self {
            Self::W13 => of("weight", &[names.gate, names.up]),
            Self::W13Bias => of("bias", &[names.gate, names.up]),
            Self::W2 => of("weight", &[names.down]),
            Self::W2Bias => of("bias", &[names.down]),
        }
    }

    /// Dims of each of these tensors, and the length of the rows among which ranks cut it: w2 is cut along its columns.
    fn tensor_dims(self, h: usize, i: usize) -> (Vec<usize>, usize) {
        match self {
            Self::W13 => (vec![i, h], h),
            Self::W13Bias => (vec![i], 1),
            Self::W2 => (vec![h, i], 1),
            Self::W2Bias => (vec![h], 1),
        }
    }
}

struct Loader<'a> {
    spec: &'a LoadSpec,
    packed: bool,
    vb: VarBuilder<'a>,
}

impl Loader<'_> {
    /// Reads one tensor of the last local expert, so that a size that the checkpoint does not
    /// have is an error and not an allocation.
    fn probe(&self) -> Result<()> {
        let LoadSpec { hidden_size: h, intermediate_size: i, .. } = *self.spec;
        if let Some(last) = self.spec.num_local().checked_sub(1)
            && !self.packed
        {
            self.vb.get((i, h), &format!("{}.{}.weight", self.spec.expert(last), self.spec.names.gate))?;
        }
        Ok(())
    }

    fn load<T: Float>(&self, pack: Pack) -> Result<Tensor> {
        if self.packed { self.load_packed::<T>(pack) } else { self.load_experts::<T>(pack) }
    }

    fn load_packed<T: Float>(&self, pack: Pack) -> Result<Tensor> {
        let spec = self.spec;
        let mut dims = pack.expert_dims(spec.hidden_size, spec.intermediate_size);
        let expert = dims.iter().product::<usize>();
        dims.insert(0, spec.num_experts);
        if spec.num_local() == 0 {
            return self.fill::<T>(pack, |_, _| Ok(false));
        }
        let whole = self.vb.get(dims, &pack.name(&spec.names))?.contiguous()?;
        if spec.is_whole() {
            return Ok(whole);
        }
        let guard = TensorView::new(&whole)?;
        let source = guard.view()?.cpu::<T>()?;
        let (_, row) = pack.tensor_dims(spec.hidden_size, spec.intermediate_size);
        let has_variable = gradient::has_variable(&whole);
        self.fill(pack, |slot, out| {
            self.copy_part(row, &source[spec.expert(slot) * expert..][..expert], out);
            Ok(has_variable)
        })
    }

    fn load_experts<T: Float>(&self, pack: Pack) -> Result<Tensor> {
        let names = pack.tensors(&self.spec.names);
        let (dims, row) = pack.tensor_dims(self.spec.hidden_size, self.spec.intermediate_size);
        self.fill::<T>(pack, |slot, out| {
            let id = self.spec.expert(slot);
            let len = out.len() / names.len();
            let mut has_variable = false;
            for (name, out) in names.iter().zip(out.chunks_exact_mut(len)) {
                let tensor = self.vb.get(&dims[..], &format!("{id}.{name}"))?.contiguous()?;
                has_variable |= gradient::has_variable(&tensor);
                self.copy_part(row, TensorView::new(&tensor)?.view()?.cpu::<T>()?, out);
            }
            Ok(has_variable)
        })
    }

    /// Copies this rank's part of matrices [I, row], one after the other; what is not cut, as a whole.
    fn copy_part<T: Float>(&self, row: usize, from: &[T], to: &mut [T]) {
        if from.len() == to.len() {
            return to.copy_from_slice(from);
        }
        let start = self.spec.start() * row;
        let width = self.spec.width() * row;
        let matrices = from.chunks_exact(self.spec.intermediate_size * row);
        for (from, to) in matrices.zip(to.chunks_exact_mut(width)) {
            to.copy_from_slice(&from[start..][..width]);
        }
    }

    /// Allocates a pack and fills every local slot of it, in parallel. The zeros are untouched pages, so
    /// each is first written by the thread that loads it. `fill_one` says whether a variable is behind what it copied.
    fn fill<T: Float>(
        &self,
        pack: Pack,
        fill_one: impl Fn(usize, &mut [T]) -> Result<bool> + Sync,
    ) -> Result<Tensor> {
        let mut dims = pack.expert_dims(self.spec.hidden_size, self.spec.width());
        let expert = dims.iter().product::<usize>();
        dims.insert(0, self.spec.num_local());
        let mut data = T::zeros(self.spec.num_local() * expert);
        let slots = data.par_chunks_mut(expert).enumerate().map(|(slot, out)| fill_one(slot, out));
        let has_variable = slots.try_reduce(|| false, |a, b| Ok(a | b))?;
        gradient::copy_of(has_variable, Tensor::from_vec(data, dims, &Device::Cpu)?)
    }
}
