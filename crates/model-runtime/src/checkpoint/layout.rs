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

/// On a GPU this number of columns of weights with minima share their floats, so a part has whole ones.
const GPU_PART: usize = 128;

/// What a checkpoint has, as one rank sees it.
#[derive(Clone, Debug)]
pub struct TensorLayout {
    /// All tensors, in their stored shapes.
    pub tensors: Vec<TensorSpec>,
    /// The parts of stored tensors that this rank holds. It holds all other tensors whole, or does not need them.
    pub slices: Vec<TensorSlice>,
    /// Experts in a stored pack that the geometry places on other ranks, one by one. A map may place them on this rank.
    pub elsewhere: Vec<TensorSlice>,
    /// The parts of this rank's packs of experts, under the names `w13` and `w2`, where no stored tensor
    /// is such a pack.
    pub packs: Vec<TensorSlice>,
    /// Stored tensors of which this rank holds nothing: experts of other ranks that are stored one by one.
    pub absent: Vec<String>,
    /// Matrices that a layer loads as floats, even if the checkpoint has quantised them.
    pub floats: HashSet<String>,
    /// Tensors that keep their digits: a layer holds them in f32 if the model's dtype would round a value of them.
    pub exact: HashSet<String>,
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

/// Shared experts that may be packed after the routed ones.
#[derive(Clone, Copy, Debug)]
pub struct SharedPacks<'a> {
    /// How many; each is as wide as a routed one.
    pub count: usize,
    /// Prefix of their stored matrices, in which the rows of one expert follow the rows of another.
    pub stored: &'a str,
    /// Prefix of the packs that hold them after the routed experts.
    pub packs: &'a str,
}

impl TensorLayout {
    /// No tensors yet, for the rank of this geometry.
    pub fn new(geometry: &Geometry) -> Self {
        let (tensors, slices, elsewhere, packs, absent, floats, exact) = Default::default();
        Self { tensors, slices, elsewhere, packs, absent, floats, exact, geometry: geometry.clone() }
    }

    /// The number of elements of each stored tensor that this rank holds.
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

    /// The slices that a [`RankView`](super::RankView) has for a device. On the CPU modules fill their packs
    /// themselves, from mapped files. For another device, packs are listed too, and each is copied there as a whole.
    pub fn slices_for(self, device: &Device) -> Vec<TensorSlice> {
        match device {
            Device::Cpu => [self.slices, self.elsewhere].concat(),
            _ => [self.slices, self.elsewhere, self.packs].concat(),
        }
    }

    /// Fails where a quantised checkpoint cannot have these matrices, this rank's part of one cuts through a group, or
    /// no kernel of the CPU, or of GPUs, reads a number format. Matrices that are loaded as floats need no kernel, and
    /// are cut like floats.
    ///
    /// # Errors
    /// The first such matrix, with the numbers of ranks that work; a number format, with what works in its place.
    pub fn check_quantised(&self, quantisation: &QuantConfig, on_gpu: bool) -> Result<(), QuantError> {
        if quantisation.is_dequantised() {
            return Ok(());
        }
        let held: HashMap<&str, &TensorSlice> = self.slices.iter().map(|s| (s.stored.as_str(), s)).collect();
        for spec in &self.tensors {
            let (Some(module), &[n, k]) = (spec.name.strip_suffix(".weight"), spec.shape.as_slice()) else {
                continue;
            };
            let format = quantisation.format_of(module)?;
            if format == Format::Plain || self.floats.contains(&spec.name) {
                continue;
            }
            let part =
                held.get(spec.name.as_str()).and_then(|slice| slice.ranges.last()).map_or(k, Range::len);
            let mut sizes = format.tp_sizes(k);
            if on_gpu && format.scheme().has_minima() {
                sizes.retain(|ranks| *ranks == 1 || (k / ranks).is_multiple_of(GPU_PART));
            }
            let ranks = k.checked_div(part).unwrap_or(1);
            let scheme = format.scheme();
            if expect_codec(scheme, on_gpu).is_err() {
                return Err(self.without_kernel(module, format, on_gpu));
            }
            if !sizes.contains(&ranks) {
                let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
                let problem = format!(
                    "{} of [{n}, {k}] cannot be cut into {ranks} parts of {part} columns: that cuts through groups; {} work, \
                     or with `dequantise` every number that divides the columns",
                    scheme,
                    sizes.join(", ")
                );
                return Err(QuantError::matrix(module, problem));
            }
        }
        Ok(())
    }

    /// The refusal of a number format that no kernel reads, with the memory that the weights take as floats.
    fn without_kernel(&self, module: &str, format: Format, on_gpu: bool) -> QuantError {
        let place = if on_gpu { "a GPU" } else { "the CPU" };
        let what = format!("weights in {} ({}) on {place} (`{module}`)", format.scheme(), format.name());
        let elements: usize = self.held().iter().map(|tensor| tensor.elements).sum();
        let gib = (2 * elements) as f64 / (1u64 << 30) as f64;
        let floats = format!("set `dequantise` to load it as floats ({gib:.2} GiB in bf16)");
        let works = match on_gpu {
            true => format!("run it with `device` cpu, or {floats}"),
            false => floats,
        };
        QuantError::Unsupported { what, works }
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

    /// A tensor of which this rank holds several runs of rows. The rank sees these rows as one matrix.
    pub fn runs(&mut self, name: impl Into<String>, dims: &[usize], runs: &[Range<usize>]) {
        let name = name.into();
        let held: usize = runs.iter().map(Range::len).sum();
        if dims.first() != Some(&held) {
            let others = dims.iter().skip(1).map(|&dim| 0..dim);
            let ranges =
                |rows: &Range<usize>| [rows.clone()].into_iter().chain(others.clone()).collect::<Vec<_>>();
            self.slices.extend(runs.iter().map(|rows| TensorSlice::new(&name, &ranges(rows))));
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

    pub(super) fn mlp(
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
