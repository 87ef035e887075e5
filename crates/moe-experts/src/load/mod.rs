//! Loading expert weights from a checkpoint straight into the packs.
//!
//! Most of a large model is experts, so this code determines its load time and its peak memory. Every pack is allocated
//! once and not touched before all threads fill it. Each thread holds one tensor of the checkpoint at a time, copies
//! the rows of this rank and drops the tensor.

use candle_core::{Device, Result, Tensor};
use candle_nn::VarBuilder;
use moe_kernels::names::{MlpNames, PackOrder};
use moe_kernels::{Float, TensorView, gradient, with_float};
use rayon::prelude::*;

mod spec;
mod unread;

pub use spec::LoadSpec;

use crate::weights::ExpertWeights;

impl ExpertWeights {
    /// Loads the experts of this rank, in the dtype (f32, bf16 or f16) and onto the device of `vb`. Three layouts are
    /// known: this rank's packs are used if `w13` is present, otherwise the packed layout if `gate_up_proj` is present,
    /// otherwise one expert at a time.
    ///
    /// | layout | tensor | shape |
    /// |---|---|---|
    /// | per expert | `{id}.gate_proj.weight`, `{id}.up_proj.weight` | [I, H] |
    /// | | `{id}.down_proj.weight` | [H, I] |
    /// | | with biases: `{id}.gate_proj.bias`, `{id}.up_proj.bias`, `{id}.down_proj.bias` | `[I]`, `[I]`, `[H]` |
    /// | packed | `gate_up_proj` | [E, 2I, H], gate rows, then up rows; or by columns ([`PackOrder`]) |
    /// | | `down_proj` | [E, H, I] |
    /// | | with biases: `gate_up_proj_bias`, `down_proj_bias` | [E, 2I], [E, H] |
    /// | this rank's | `w13`, `w2`; with biases: `w13_bias`, `w2_bias` | see [`ExpertWeights`] |
    ///
    /// [`LoadSpec::with_names`] sets other names. All threads read per-expert tensors, one at a time each, straight
    /// into the packs; experts of other ranks are not read. A packed tensor becomes the pack itself if this rank holds
    /// all of it. Otherwise the whole tensor is in memory while this rank's part is copied, because a `VarBuilder`
    /// reads whole tensors. A source that can read parts offers this rank's packs instead. The down bias is not split
    /// by tensor parallelism: the code that adds the ranks' partial sums adds it once.
    ///
    /// # Errors
    /// A `spec` that contradicts itself; a missing tensor or one of another shape, with its name; another dtype. Before
    /// a pack is allocated, sizes that the checkpoint does not have are refused, and so are tensors that `spec` does
    /// not use ([`LoadSpec::refuse_unread`]).
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
            // If a rank on a device has all experts of a packed checkpoint, the checkpoint itself provides the pack,
            // and nothing is copied here.
            if loader.packed && spec.is_whole() && !device.is_cpu() && spec.num_local() > 0 {
                return pack.whole(spec, &on_device);
            }
            let tensor = with_float!(dtype, "load experts", T => loader.load::<T>(pack))?;
            tensor.to_device(&device)
        };
        loader.probe()?;
        let w13 = load(Pack::W13)?;
        let w2 = load(Pack::W2)?;
        // Experts whose matrices are shown one by one may have their biases in packs.
        let [w13_bias, w2_bias] = Self::load_biases(spec, &on_device)?;
        Self::new(w13, w2, w13_bias, w2_bias)
    }

    /// Loads only the biases, of gate and up and of down, for experts whose matrices are loaded in another way. Returns
    /// `None` if there are no biases.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load).
    pub fn load_biases(spec: &LoadSpec, vb: &VarBuilder) -> Result<[Option<Tensor>; 2]> {
        if !spec.has_bias {
            return Ok([None, None]);
        }
        spec.check()?;
        let device = vb.device();
        let packed = vb.contains_tensor(&Pack::W13Bias.name(&spec.names));
        let loader = Loader { spec, packed, vb: vb.clone().set_device(Device::Cpu) };
        let load = |pack: Pack| -> Result<Option<Tensor>> {
            let bias = with_float!(vb.dtype(), "load experts", T => loader.load::<T>(pack))?;
            bias.to_device(device).map(Some)
        };
        Ok([load(Pack::W13Bias)?, load(Pack::W2Bias)?])
    }

    /// Loads the experts' separate tensors, each to the device without a copy on the host. While a pack is made, its
    /// parts are in memory, too.
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

    /// Loads this rank's packs, which the source offers.
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
    /// The name in the packed layout.
    fn name(self, names: &MlpNames) -> String {
        match self {
            Self::W13 => names.packed_gate_up.to_string(),
            Self::W2 => names.packed_down.to_string(),
            Self::W13Bias => format!("{}_bias", names.packed_gate_up),
            Self::W2Bias => format!("{}_bias", names.packed_down),
        }
    }

    /// Loads the pack of all experts in rows. If the checkpoint stores it by columns, it is transposed.
    fn whole(self, spec: &LoadSpec, vb: &VarBuilder) -> Result<Tensor> {
        let LoadSpec { num_experts: e, hidden_size: h, intermediate_size: i, .. } = *spec;
        let name = self.name(&spec.names);
        match (self, spec.names.pack_order) {
            (Self::W13, PackOrder::Columns { in_turns: true }) => {
                let turns = vb.get((e, h, 2 * i), &name)?.reshape((e, h, i, 2))?;
                turns.permute((0, 3, 2, 1))?.contiguous()?.reshape((e, 2 * i, h))
            }
            (Self::W13, PackOrder::Columns { in_turns: false }) => {
                vb.get((e, h, 2 * i), &name)?.transpose(1, 2)?.contiguous()
            }
            (Self::W2, PackOrder::Columns { .. }) => vb.get((e, i, h), &name)?.transpose(1, 2)?.contiguous(),
            (Self::W13Bias, PackOrder::Columns { in_turns: true }) => {
                let turns = vb.get((e, 2 * i), &name)?.reshape((e, i, 2))?;
                turns.transpose(1, 2)?.contiguous()?.reshape((e, 2 * i))
            }
            _ => {
                let dims = [&[e], &self.expert_dims(h, i)[..]].concat();
                vb.get(dims, &name)?.contiguous()
            }
        }
    }

    /// The name under which the source offers this rank's pack.
    fn local_name(self) -> &'static str {
        match self {
            Self::W13 => "w13",
            Self::W2 => "w2",
            Self::W13Bias => "w13_bias",
            Self::W2Bias => "w2_bias",
        }
    }

    /// The dims of one expert, for an intermediate size of `i`.
    fn expert_dims(self, h: usize, i: usize) -> Vec<usize> {
        match self {
            Self::W13 => vec![2 * i, h],
            Self::W2 => vec![h, i],
            Self::W13Bias => vec![2 * i],
            Self::W2Bias => vec![h],
        }
    }

    /// The names of an expert's separate tensors, in the order in which they are in the pack.
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

    /// The dims of each of these tensors, and the length of the rows among which ranks cut it. w2 is cut along its
    /// columns.
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
    /// Reads one tensor of the last local expert. If the checkpoint does not have the sizes of `spec`, this fails
    /// before a pack is allocated.
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
        let expert = pack.expert_dims(spec.hidden_size, spec.intermediate_size).iter().product::<usize>();
        if spec.num_local() == 0 {
            return self.fill::<T>(pack, |_, _| Ok(false));
        }
        let whole = pack.whole(spec, &self.vb)?;
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

    /// Copies this rank's part of matrices [I, row], one after the other. A tensor that is not cut is copied as a
    /// whole.
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

    /// Allocates a pack and fills every local slot of it in parallel. The zeros are pages that were never touched, so
    /// each page is first written by the thread that loads it. `fill_one` returns whether its values were computed from
    /// a variable.
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
