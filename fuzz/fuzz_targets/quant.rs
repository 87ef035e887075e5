//! A quantisation header and, after a NUL, sizes and the bytes of a matrix in the format that it names: refused with a
//! message, or read, whole and in ranks' parts.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_fuzz::split;
use moe_quant::safetensors::tensor::TensorView;
use moe_quant::{Format, QuantConfig, QuantRows, Reader, TensorSpec, dequantise, layout};

const MODULES: [&str; 4] = [
    "model.layers.0.mlp.experts.1.up_proj",
    "model.layers.0.mlp.gate",
    "model.layers.10.self_attn.q_proj",
    "lm_head",
];

/// A tensor of the fuzzer's bytes.
struct Tensor(TensorSpec, Vec<u8>, usize, usize);

impl Tensor {
    fn new(spec: TensorSpec, choice: u8, bytes: &mut impl Iterator<Item = u8>) -> Self {
        let choice = usize::from(choice);
        let dtype = choice % spec.dtypes.len();
        let shape = choice % spec.shapes.len();
        let size = spec.shapes[shape].iter().product::<usize>() * spec.dtypes[dtype].bitsize() / 8;
        Self(spec, bytes.take(size).collect(), dtype, shape)
    }

    fn view(&self) -> TensorView<'_> {
        let Self(spec, bytes, dtype, shape) = self;
        TensorView::new(spec.dtypes[*dtype], spec.shapes[*shape].clone(), bytes).expect("bytes of its shape")
    }
}

/// Columns come out the same when they are cut.
fn check_parts(reader: &Reader, format: Format) {
    let Ok(weights) = dequantise(reader) else { return };
    let n = reader.shape().0;
    let k = reader.inputs();
    for tp in format.tp_sizes(k).into_iter().take(4) {
        let width = k / tp;
        let part =
            reader.clone().columns(k - width..k).and_then(|r| r.rows(n / 2..n)).expect("a size that works");
        let part = dequantise(&part).expect("rows that were read before");
        let expected = (n / 2..n).flat_map(|row| &weights[row * k + k - width..(row + 1) * k]);
        assert!(part.iter().map(|w| w.to_bits()).eq(expected.map(|w| w.to_bits())));
    }
}

fuzz_target!(|bytes: &[u8]| {
    let (header, data) = split(bytes);
    let Ok(header) = serde_json::from_slice(header) else { return };
    let config = match QuantConfig::from_header("quantization_config", &header) {
        Ok(config) => config,
        Err(e) => return drop(e.to_string()),
    };
    let [n, k, choice, data @ ..] = data else { return };
    // Multiples of 8 more often than not: most formats take nothing else.
    let size = |byte: u8| if byte < 192 { 8 * (usize::from(byte) % 24 + 1) } else { usize::from(byte) - 191 };
    let n = size(*n);
    let k = size(*k);
    for module in MODULES {
        let format = match config.format_of(module) {
            Ok(Format::Plain) => continue,
            Ok(format) => format,
            Err(e) => return drop(e.to_string()),
        };
        let specs = match layout(format, n, k) {
            Ok(specs) => specs,
            Err(e) => return drop(e.to_string()),
        };
        let mut data = data.iter().copied().chain(std::iter::repeat_n(0, usize::MAX));
        let tensors: Vec<_> = specs.into_iter().map(|spec| Tensor::new(spec, *choice, &mut data)).collect();
        let find = |suffix: &str| tensors.iter().find(|t| t.0.suffix == suffix).map(Tensor::view);
        match Reader::new(module, format, (n, k), find) {
            Ok(reader) => {
                let _ = reader.check_finite().map_err(|e| e.to_string());
                check_parts(&reader, format);
            }
            Err(e) => drop(e.to_string()),
        }
    }
});
