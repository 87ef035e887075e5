//! Packs that the device makes from the bytes of a file are equal to packs that the host makes from its rows.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result};
use moe_kernels::cuda::Staging;
use moe_kernels::half::{bf16, f16};
use moe_kernels::quant::{LogicalRows, Opened, QuantPacking, QuantPart, QuantRows, QuantSource, QuantUse};
use moe_kernels::{Exec, QuantGroup, QuantScheme, Weight};
use moe_quant::safetensors::{Dtype, tensor::TensorView};
use moe_quant::{Format, GptqZeros, IntFormat, Reader, TensorSpec, layout};

use crate::common::*;

/// Values of scales. They determine in which type a pack stores them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scales {
    F16,
    Bf16,
    /// Too small for f16.
    TinyBf16,
    /// Values that f16 holds.
    NarrowF32,
    F32,
}

const SCALES: [Scales; 5] = [Scales::F16, Scales::Bf16, Scales::TinyBf16, Scales::NarrowF32, Scales::F32];

/// A matrix of random bits in the layout of a file.
struct Filed {
    format: Format,
    shape: (usize, usize),
    tensors: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>,
}

impl Filed {
    fn new(rng: &mut Rng, format: Format, (n, k): (usize, usize), scales: Scales) -> Self {
        let tensor = |spec: &TensorSpec| {
            let shape = spec.shapes[0].clone();
            let count = shape.iter().product();
            let (dtype, bytes) = match spec.suffix {
                "weight" => (Dtype::F8_E4M3, (0..count).map(|_| rng.bits() as u8 & 0xf7).collect()),
                "qweight" | "weight_packed" => {
                    (Dtype::I32, (0..4 * count).map(|_| rng.bits() as u8).collect())
                }
                "qzeros" | "weight_zero_point" => (Dtype::I32, zeros(rng, format, 4 * count)),
                "g_idx" => (Dtype::I32, order(format, k)),
                "weight_shape" => {
                    (Dtype::I64, [n, k].iter().flat_map(|n| (*n as i64).to_le_bytes()).collect())
                }
                _ => scale_bytes(rng, scales, count),
            };
            (spec.suffix, dtype, shape, bytes)
        };
        Self { format, shape: (n, k), tensors: layout(format, n, k).unwrap().iter().map(tensor).collect() }
    }

    fn reader(&self) -> Result<Reader<'_>> {
        let find = |suffix: &str| {
            let (_, dtype, shape, bytes) = self.tensors.iter().find(|(name, ..)| *name == suffix)?;
            TensorView::new(*dtype, shape.clone(), bytes).ok()
        };
        Ok(Reader::new("m", self.format, self.shape, find)?)
    }

    fn bytes(&mut self, suffixes: &[&str]) -> &mut Vec<u8> {
        let tensor = self.tensors.iter_mut().find(|(name, ..)| suffixes.contains(name));
        &mut tensor.unwrap().3
    }
}

/// Words of zero points: any, or the middle of the range if the format is symmetric.
fn zeros(rng: &mut Rng, format: Format, len: usize) -> Vec<u8> {
    let int = format.int().unwrap();
    if int.zero_point {
        return (0..len).map(|_| rng.bits() as u8).collect();
    }
    let stored = match format {
        Format::Gptq { zeros: GptqZeros::V1, .. } => int.middle() - 1,
        _ => int.middle(),
    };
    vec![if int.bits == 4 { stored << 4 | stored } else { stored }; len]
}

/// The group of each column, in order.
fn order(format: Format, k: usize) -> Vec<u8> {
    let group = format.scheme().group_size(k);
    (0..k).flat_map(|column| ((column / group) as i32).to_le_bytes()).collect()
}

fn scale_bytes(rng: &mut Rng, scales: Scales, count: usize) -> (Dtype, Vec<u8>) {
    let mut value = || 0.01 * (0.75 + 0.25 * rng.float());
    let narrow = |x: f32| f16::from_f32(x);
    match scales {
        Scales::F16 => (Dtype::F16, (0..count).flat_map(|_| narrow(value()).to_le_bytes()).collect()),
        Scales::Bf16 => {
            (Dtype::BF16, (0..count).flat_map(|_| bf16::from_f32(value()).to_le_bytes()).collect())
        }
        Scales::TinyBf16 => {
            (Dtype::BF16, (0..count).flat_map(|_| bf16::from_f32(value() * 1e-7).to_le_bytes()).collect())
        }
        Scales::NarrowF32 => {
            (Dtype::F32, (0..count).flat_map(|_| narrow(value()).to_f32().to_le_bytes()).collect())
        }
        Scales::F32 => (Dtype::F32, (0..count).flat_map(|_| value().to_le_bytes()).collect()),
    }
}

/// A reader that only provides rows.
struct RowsAlone<'a>(Reader<'a>);

impl QuantRows for RowsAlone<'_> {
    fn shape(&self) -> (usize, usize) {
        self.0.shape()
    }
    fn scheme(&self) -> QuantScheme {
        QuantRows::scheme(&self.0)
    }
    fn perm(&self) -> Option<&[u32]> {
        self.0.perm()
    }
    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        self.0.read(rows, out)
    }
}

/// Rows and columns of a matrix.
type Part<'a> = (&'a Filed, Range<usize>, Range<usize>);

/// Parts of matrices by the names of their modules.
struct Source<'a> {
    modules: HashMap<String, Part<'a>>,
    on_host: bool,
    staging: Arc<Staging>,
}

impl fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} modules", self.modules.len())
    }
}

impl QuantSource for Source<'_> {
    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        Ok(self.modules.get(module).map_or(QuantScheme::NONE, |m| m.0.format.scheme()))
    }
    fn open(&self, module: &str) -> Result<Option<QuantPart<'_>>> {
        let Some((filed, rows, columns)) = self.modules.get(module) else { return Ok(None) };
        let reader = filed.reader()?.rows(rows.clone())?.columns(columns.clone())?;
        let inputs = 0..reader.shape().1;
        let rows: Box<dyn QuantRows> =
            if self.on_host { Box::new(RowsAlone(reader)) } else { Box::new(reader) };
        Ok(Some(QuantPart { rows, inputs }))
    }
    fn staging(&self, _: &Exec) -> Result<Option<Arc<Staging>>> {
        Ok(Some(Arc::clone(&self.staging)))
    }
}

/// A case: stacked matrices of modules, and the part of each that a rank holds.
struct Case<'a> {
    what: String,
    matrices: Vec<Vec<Part<'a>>>,
    usage: QuantUse,
}

impl Case<'_> {
    fn pack(&self, on_host: bool, staging: &Arc<Staging>) -> Result<Weight> {
        let name = |e: usize, i: usize| format!("{e}.{i}");
        let named =
            |(e, parts): (usize, &Vec<_>)| -> Vec<String> { (0..parts.len()).map(|i| name(e, i)).collect() };
        let names: Vec<_> = self.matrices.iter().enumerate().map(named).collect();
        let all = self.matrices.iter().enumerate();
        let modules = all.flat_map(|(e, parts)| {
            parts.iter().cloned().enumerate().map(move |(i, part)| (name(e, i), part))
        });
        let source = Source { modules: modules.collect(), on_host, staging: Arc::clone(staging) };
        match Weight::quantised(&source, &names, self.usage, DType::BF16, &cuda())? {
            Opened::Packed(weight) => weight.with_experts(),
            other => panic!("{}: {other:?}", self.what),
        }
    }

    /// Makes the packs on both sides and compares them.
    fn check(&self, staging: &Arc<Staging>) {
        let host = self.pack(true, staging).unwrap();
        let device = self.pack(false, staging).unwrap();
        assert_eq!(device.packing(), Some(QuantPacking::Device), "{}", self.what);
        assert!(matches!(host.packing(), Some(QuantPacking::Host(_))), "{}", self.what);
        let form = |weight: &Weight| format!("{:?} {:?}", weight.quantisation(), weight.dims());
        assert_eq!(form(&host), form(&device), "{}", self.what);
        for e in 0..self.matrices.len() {
            let want = pieces(&host, e);
            let got = pieces(&device, e);
            assert_eq!(want.len(), got.len(), "{} matrix {e}", self.what);
            for (i, (want, got)) in want.iter().zip(&got).enumerate() {
                let differs = want.iter().zip(got).position(|(a, b)| a != b);
                assert!(
                    want.len() == got.len() && differs.is_none(),
                    "{} matrix {e} array {i}: {differs:?}",
                    self.what
                );
            }
        }
    }
}

/// Integers, scales and zero points of a matrix of a pack.
fn pieces(weight: &Weight, e: usize) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let see = |_, view: moe_kernels::View<'_>| {
        all.push(cuda().to_host(view)?.view().cpu::<u8>()?.to_vec());
        Ok(())
    };
    weight.see_expert(e, see).unwrap();
    all
}

/// Buffers of several sizes, made once.
#[derive(Default)]
struct Buffers([OnceCell<Arc<Staging>>; 2]);

impl Buffers {
    fn any(&self, rng: &mut Rng) -> &Arc<Staging> {
        let i = rng.below(2);
        self.0[i].get_or_init(|| Arc::new(Staging::new(6, [96 << 10, 4 << 20][i], &cuda()).unwrap()))
    }
}

fn int(bits: u8, group: usize, zero_point: bool) -> IntFormat {
    let group = if group == 0 { QuantGroup::Channel } else { QuantGroup::Size(group) };
    IntFormat { bits, group, zero_point, act_order: false }
}

/// Formats for rows of `k` columns.
fn formats(k: usize) -> Vec<Format> {
    let mut all = Vec::new();
    for (group, zero_point) in [(0, false), (0, true), (32, true), (64, false), (128, true)] {
        let short = group != 0 && !k.is_multiple_of(group);
        for bits in [4, 8] {
            let int = int(bits, group, zero_point);
            all.extend([GptqZeros::V1, GptqZeros::V2].map(|zeros| Format::Gptq { int, zeros }));
            all.extend((!short).then_some(Format::PackQuantized { int }));
            all.extend((!short && bits == 4).then_some(Format::Awq { int }));
        }
    }
    let block = |n, k| QuantGroup::Block { n, k };
    for scales in [block(128, 128), block(16, 40), block(24, 64), QuantGroup::Channel, QuantGroup::Tensor] {
        all.push(Format::Fp8 { scales, scale_inv: true });
    }
    all
}

#[test]
fn experts_are_packed_as_the_host_packs_them() {
    let mut rng = Rng::new();
    let buffers = Buffers::default();
    for (n, k) in small([(16, 64), (24, 96), (40, 192), (128, 128), (72, 320), (768, 512)], 64, |size| size.0)
    {
        for (i, format) in formats(k).into_iter().enumerate() {
            let scales = SCALES[(i + rng.below(5)) % 5];
            let modules: Vec<_> = (0..6).map(|_| Filed::new(&mut rng, format, (n, k), scales)).collect();
            let whole = |filed| (filed, 0..n, 0..k);
            let gate_up = modules.chunks(2).map(|two| two.iter().map(whole).collect()).collect();
            let down = modules.iter().map(|one| vec![whole(one)]).collect();
            for (usage, matrices) in
                [(QuantUse::GateUp, gate_up), (QuantUse::RowParallel { segments: 1 }, down)]
            {
                let what = format!("{format:?} [{n}, {k}] {scales:?} {usage:?}");
                Case { what, matrices, usage }.check(buffers.any(&mut rng));
            }
        }
    }
}

#[test]
fn dense_weights_of_several_modules_are_packed_as_the_host_packs_them() {
    let mut rng = Rng::new();
    let buffers = Buffers::default();
    for (sizes, k) in
        small([([32, 8, 8], 128), ([128, 24, 40], 384), ([1024, 128, 128], 1024)], 128, |size| size.1)
    {
        for (i, format) in formats(k).into_iter().enumerate() {
            let scales = SCALES[(i + rng.below(5)) % 5];
            let modules = sizes.map(|n| Filed::new(&mut rng, format, (n, k), scales));
            let matrices = vec![modules.iter().zip(sizes).map(|(filed, n)| (filed, 0..n, 0..k)).collect()];
            let what = format!("{format:?} {sizes:?} x {k} {scales:?}");
            Case { what, matrices, usage: QuantUse::Linear }.check(buffers.any(&mut rng));
        }
    }
}

#[test]
fn parts_of_ranks_are_packed_as_the_host_packs_them() {
    let mut rng = Rng::new();
    let buffers = Buffers::default();
    let n = 96;
    let k = 512;
    for (i, format) in formats(k).into_iter().enumerate() {
        let scales = SCALES[(i + rng.below(5)) % 5];
        let modules: Vec<_> = (0..4).map(|_| Filed::new(&mut rng, format, (n, k), scales)).collect();
        for tp in format.tp_sizes(k).into_iter().filter(|tp| [2, 4, 8].contains(tp)) {
            let rank = rng.below(tp);
            let what = format!("{format:?} {scales:?} tp {tp}");
            let rows = n / tp * rank..n / tp * (rank + 1);
            let columns = k / tp * rank..k / tp * (rank + 1);
            let gate_up =
                modules.chunks(2).map(|two| two.iter().map(|one| (one, rows.clone(), 0..k)).collect());
            let gate_up = Case { what: what.clone(), matrices: gate_up.collect(), usage: QuantUse::GateUp };
            gate_up.check(buffers.any(&mut rng));
            let down = modules.iter().map(|one| vec![(one, 0..n, columns.clone())]).collect();
            Case { what, matrices: down, usage: QuantUse::Linear }.check(buffers.any(&mut rng));
        }
        // The rows are cut at any place.
        let first = rng.below(n - 1);
        let odd = first..first + 1 + rng.below(n - first - 1);
        let matrices = vec![vec![(&modules[0], odd.clone(), 0..k), (&modules[1], odd.clone(), 0..k)]];
        let what = format!("{format:?} {scales:?} rows {odd:?}");
        Case { what, matrices, usage: QuantUse::GateUp }.check(buffers.any(&mut rng));
    }
}

#[test]
fn values_that_a_format_does_not_have_are_the_errors_of_the_host() {
    let mut rng = Rng::new();
    let buffers = Buffers::default();
    let gptq = Format::Gptq { int: int(4, 32, false), zeros: GptqZeros::V1 };
    let awq = Format::Awq { int: int(4, 32, false) };
    let fp8 = Format::Fp8 { scales: QuantGroup::Channel, scale_inv: false };
    for (format, suffixes, wanted) in [
        (gptq, ["qzeros"], "has the zero point"),
        (awq, ["qzeros"], "has the zero point"),
        (fp8, ["weight"], "is NaN; the file is damaged"),
    ] {
        let mut filed = Filed::new(&mut rng, format, (64, 128), Scales::F16);
        let bytes = filed.bytes(&suffixes);
        let at = rng.below(bytes.len());
        bytes[at] = if format == fp8 { 0xff } else { 0x12 };
        let matrices = vec![vec![(&filed, 0..64, 0..128)]];
        let case = Case { what: format!("{format:?}"), matrices, usage: QuantUse::Linear };
        let staging = buffers.any(&mut rng);
        // The lines of a backtrace, which RUST_BACKTRACE=1 adds, are removed.
        let frame = |line: &&str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
        let message = |error: candle_core::Error| -> String {
            error.to_string().lines().filter(|line| !frame(line)).collect::<Vec<_>>().join("\n")
        };
        let errors = [true, false].map(|on_host| message(case.pack(on_host, staging).map(drop).unwrap_err()));
        assert!(errors[0].contains(wanted), "{}", errors[0]);
        assert_eq!(errors[0], errors[1]);
    }
}

/// Columns with an order are sorted on the host, and the weight reports that.
#[test]
fn act_order_is_packed_by_the_host() {
    let mut rng = Rng::new();
    let buffers = Buffers::default();
    let act_order = IntFormat { act_order: true, ..int(4, 32, true) };
    let filed =
        Filed::new(&mut rng, Format::Gptq { int: act_order, zeros: GptqZeros::V2 }, (32, 128), Scales::F16);
    let case = Case {
        what: "act-order".into(),
        matrices: vec![vec![(&filed, 0..32, 0..128)]],
        usage: QuantUse::Linear,
    };
    let packing = case.pack(false, buffers.any(&mut rng)).unwrap().packing();
    assert!(matches!(&packing, Some(QuantPacking::Host(why)) if why.contains("act-order")), "{packing:?}");
}
