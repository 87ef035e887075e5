//! The tensors of a checkpoint and the part of each that one rank holds, listed together.
//!
//! A family of models names each tensor once, with its shape and how ranks cut it. The shapes verify a
//! checkpoint; the parts are what a [`RankView`](super::RankView) reads.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use candle_core::Device;
use moe_comm::{Geometry, GeometryError};
use moe_kernels::names::MlpNames;
use moe_kernels::plan::expect_codec;
use moe_quant::{Format, QuantConfig, QuantError};

use super::{TensorSlice, TensorSpec};

/// What a checkpoint has, as one rank sees it.
#[derive(Clone, Debug)]
pub struct TensorLayout {
    /// All tensors, in their stored shapes.
    pub tensors: Vec<TensorSpec>,
    /// The parts of some that this rank holds; the others it holds whole, or does not need.
    pub slices: Vec<TensorSlice>,
    /// Experts in a stored pack that the geometry places on other ranks, one by one: a map may place them here.
    pub elsewhere: Vec<TensorSlice>,
    /// The parts of this rank's packs of experts, under the names `w13` and `w2`, where no stored tensor
    /// is such a pack.
    pub packs: Vec<TensorSlice>,
    /// Stored tensors of which this rank holds nothing: experts of other ranks that are stored one by one.
    pub absent: Vec<String>,
    /// The rank's place.
    pub geometry: Geometry,
}

/// How much of a stored tensor a rank holds.
#[derive(Clone, Copy, Debug)]
pub struct HeldTensor<'a> {
    /// The whole tensor.
    pub stored: &'a TensorSpec,
    /// Elements on this rank.
    pub elements: usize,
}

/// Shared experts that may be packed behind the routed ones.
#[derive(Clone, Copy, Debug)]
pub struct SharedPacks<'a> {
    /// How many; each is as wide as a routed one.
    pub count: usize,
    /// Prefix of their matrices, which lie under each other.
    pub stored: &'a str,
    /// Prefix of the packs that hold them behind the others.
    pub packs: &'a str,
}

impl TensorLayout {
    /// No tensors yet, for the rank of this geometry.
    pub fn new(geometry: &Geometry) -> Self {
        let (tensors, slices, elsewhere, packs, absent) = Default::default();
        Self { tensors, slices, elsewhere, packs, absent, geometry: geometry.clone() }
    }

    /// How much of each stored tensor this rank holds.
    pub fn held(&self) -> Vec<HeldTensor<'_>> {
        let mut cut: HashMap<&str, usize> = HashMap::new();
        for slice in &self.slices {
            *cut.entry(&slice.stored).or_default() += slice.elements();
        }
        // A pack of which this rank holds some experts is among the slices, too.
        for slice in &self.elsewhere {
            cut.entry(&slice.stored).or_default();
        }
        let absent: HashSet<&str> = self.absent.iter().map(String::as_str).collect();
        let held = |stored: &TensorSpec| match cut.get(stored.name.as_str()) {
            _ if absent.contains(stored.name.as_str()) => 0,
            Some(&elements) => elements,
            None => stored.shape.iter().product(),
        };
        self.tensors.iter().map(|stored| HeldTensor { stored, elements: held(stored) }).collect()
    }

    /// What a [`RankView`](super::RankView) shows on a device. On the CPU modules fill their packs
    /// themselves, from mapped files; for another device packs are shown as such, and go there as a whole.
    pub fn slices_for(self, device: &Device) -> Vec<TensorSlice> {
        match device {
            Device::Cpu => [self.slices, self.elsewhere].concat(),
            _ => [self.slices, self.elsewhere, self.packs].concat(),
        }
    }

    /// Fails where a quantised checkpoint cannot have these matrices, this rank's part of one cuts through a group, or no kernel
    /// of the CPU, or of GPUs, reads a number format.
    ///
    /// # Errors
    /// The first such matrix, with the numbers of ranks that work; a number format, with what works in its place.
    pub fn check_quantised(&self, quantisation: &QuantConfig, on_gpu: bool) -> Result<(), QuantError> {
        let held: HashMap<&str, &TensorSlice> = self.slices.iter().map(|s| (s.stored.as_str(), s)).collect();
        for spec in &self.tensors {
            let (Some(module), &[n, k]) = (spec.name.strip_suffix(".weight"), spec.shape.as_slice()) else {
                continue;
            };
            let format = quantisation.format_of(module)?;
            let part =
                held.get(spec.name.as_str()).and_then(|slice| slice.ranges.last()).map_or(k, Range::len);
            let sizes = format.tp_sizes(k);
            let ranks = k.checked_div(part).unwrap_or(1);
            let scheme = format.scheme();
            if format != Format::Plain && expect_codec(scheme, on_gpu).is_err() {
                let place = if on_gpu { "a GPU" } else { "the CPU" };
                let what = format!("weights in {scheme} on {place} (`{module}`)");
                let works = if on_gpu { "--device cpu, or a checkpoint" } else { "a checkpoint" };
                let works = format!("{works} in int4, int8, FP8 or floats works");
                return Err(QuantError::Unsupported { what, works });
            }
            if format != Format::Plain && !sizes.contains(&ranks) {
                let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
                let problem = format!(
                    "{} of [{n}, {k}] cannot be cut into {ranks} parts of {part} columns: that cuts through groups; {} work",
                    scheme,
                    sizes.join(", ")
                );
                return Err(QuantError::matrix(module, problem));
            }
        }
        Ok(())
    }

    /// A tensor that every rank holds whole.
    pub fn whole(&mut self, name: impl Into<String>, dims: &[usize]) {
        self.tensors.push(TensorSpec::new(name, dims));
    }

    /// A tensor of which this rank holds a box, one range for each dimension.
    pub fn part(&mut self, name: impl Into<String>, dims: &[usize], ranges: &[Range<usize>]) {
        let name = name.into();
        if !dims.iter().zip(ranges).all(|(&dim, range)| *range == (0..dim)) {
            self.slices.push(TensorSlice::new(&name, ranges));
        }
        self.whole(name, dims);
    }

    /// A matrix of which this rank holds some rows: a column-parallel product.
    pub fn rows(&mut self, name: impl Into<String>, [rows, columns]: [usize; 2], held: Range<usize>) {
        self.part(name, &[rows, columns], &[held, 0..columns]);
    }

    /// A matrix of which this rank holds some columns: a row-parallel product.
    pub fn columns(&mut self, name: impl Into<String>, [rows, columns]: [usize; 2], held: Range<usize>) {
        self.part(name, &[rows, columns], &[0..rows, held]);
    }

    /// An embedding or vocabulary projection [V, H], cut over the vocabulary.
    pub fn vocabulary(&mut self, name: impl Into<String>, vocab_size: usize, hidden: usize) {
        let held = self.geometry.vocab_shard(vocab_size);
        self.rows(name, [vocab_size, hidden], held);
    }

    /// The tensors of a [`GatedMlp`](moe_layer::GatedMlp) of [H, I], cut along I, which `what` names
    /// in an error. An MLP of width 0, which some checkpoints have, has nothing to cut.
    pub fn gated_mlp(
        &mut self,
        prefix: &str,
        names: &MlpNames,
        what: &'static str,
        [hidden, intermediate]: [usize; 2],
    ) -> Result<(), GeometryError> {
        let held = match intermediate {
            0 => 0..0,
            _ => self.geometry.row_shard(what, intermediate)?.range,
        };
        self.mlp(prefix, names, [hidden, intermediate], &held);
        Ok(())
    }

    /// The tensors of E experts of [H, I], one by one, or packed as transformers 5 writes them: whole
    /// experts of this rank, or its part of each. Packed experts are shown one by one where ranks
    /// share them, so that a rank reads its own only; and the rank's packs are listed, if they are not
    /// stored as such.
    ///
    /// With `shared` there are also packs in which shared experts lie behind the others, and whole packs are listed too.
    pub fn experts(
        &mut self,
        prefix: &str,
        names: &MlpNames,
        packed: bool,
        [experts, hidden, intermediate]: [usize; 3],
        shared: Option<SharedPacks<'_>>,
    ) -> Result<(), GeometryError> {
        let held = self.geometry.expert_intermediate(intermediate)?.range;
        let gate_up = format!("{prefix}.{}", names.packed_gate_up);
        let down = format!("{prefix}.{}", names.packed_down);
        if packed {
            self.whole(&gate_up, &[experts, 2 * intermediate, hidden]);
            self.whole(&down, &[experts, hidden, intermediate]);
        } else {
            for expert in 0..experts {
                self.mlp(&format!("{prefix}.{expert}"), names, [hidden, intermediate], &held);
            }
        }
        let first = self.packs.len();
        let is_cut = self.geometry.ep_size > 1 || self.geometry.moe_tp_size > 1;
        if packed && !is_cut {
            if let Some(shared) = shared {
                let whole = |rows, columns| [0..experts, 0..rows, 0..columns];
                let w13 =
                    TensorSlice::renamed(format!("{prefix}.w13"), &gate_up, &whole(2 * intermediate, hidden));
                let w2 = TensorSlice::renamed(format!("{prefix}.w2"), &down, &whole(hidden, intermediate));
                self.packs.extend([w13, w2]);
                self.packs_with_shared(first, prefix, names, [hidden, intermediate], &shared, &held);
            }
            return Ok(());
        }
        let layout = self.geometry.expert_layout(experts)?;
        for e in 0..experts {
            let name = format!("{prefix}.{e}");
            let here = layout.local_experts.binary_search(&(e as u32)).is_ok();
            let up = intermediate + held.start..intermediate + held.end;
            for (projection, pack, stored, rows, packed_rows, columns) in [
                (names.gate, "w13", &gate_up, held.clone(), held.clone(), 0..hidden),
                (names.up, "w13", &gate_up, held.clone(), up, 0..hidden),
                (names.down, "w2", &down, 0..hidden, 0..hidden, held.clone()),
            ] {
                let single = format!("{name}.{projection}.weight");
                let pack = format!("{prefix}.{pack}");
                let part = match packed {
                    true => TensorSlice::renamed(pack, stored, &[e..e + 1, packed_rows, columns]),
                    false => TensorSlice::renamed(pack, &single, &[rows, columns]),
                };
                if packed {
                    let shown = if here { &mut self.slices } else { &mut self.elsewhere };
                    shown.push(TensorSlice::renamed(single, stored, &part.ranges));
                } else if !here {
                    self.absent.push(single);
                }
                if here {
                    self.packs.push(part);
                }
            }
        }
        if let Some(shared) = shared.filter(|_| self.geometry.ep_size == 1) {
            self.packs_with_shared(first, prefix, names, [hidden, intermediate], &shared, &held);
        }
        Ok(())
    }

    /// The packs from `first` on once more, under another prefix, with shared experts behind them: each is I rows of the
    /// stored gate and up matrices and I columns of the down matrix, cut like the others.
    fn packs_with_shared(
        &mut self,
        first: usize,
        prefix: &str,
        names: &MlpNames,
        [hidden, intermediate]: [usize; 2],
        shared: &SharedPacks<'_>,
        held: &Range<usize>,
    ) {
        let own = self.packs[first..].iter().map(|part| {
            let name = part.name.replacen(prefix, shared.packs, 1);
            TensorSlice { name, ..part.clone() }
        });
        let mut parts: Vec<_> = own.collect();
        for expert in 0..shared.count {
            let held = expert * intermediate + held.start..expert * intermediate + held.end;
            for (projection, pack, ranges) in [
                (names.gate, "w13", [held.clone(), 0..hidden]),
                (names.up, "w13", [held.clone(), 0..hidden]),
                (names.down, "w2", [0..hidden, held.clone()]),
            ] {
                let stored = format!("{}.{projection}.weight", shared.stored);
                parts.push(TensorSlice::renamed(format!("{}.{pack}", shared.packs), stored, &ranges));
            }
        }
        self.packs.extend(parts);
    }

    fn mlp(
        &mut self,
        prefix: &str,
        names: &MlpNames,
        [hidden, intermediate]: [usize; 2],
        held: &Range<usize>,
    ) {
        for name in [names.gate, names.up] {
            self.rows(format!("{prefix}.{name}.weight"), [intermediate, hidden], held.clone());
        }
        self.columns(format!("{prefix}.{}.weight", names.down), [hidden, intermediate], held.clone());
    }
}
