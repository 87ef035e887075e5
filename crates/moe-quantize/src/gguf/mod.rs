//! Writes a float checkpoint as one GGUF file, which llama.cpp and this project run.

mod bits;
mod encode;
mod file;
mod metadata;
mod mix;
mod outputs;
mod super_blocks;
mod tokenizer;

use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::Tensor;
use half::f16;
use model_runtime::checkpoint::GgufNames;
use model_runtime::{Checkpoint, Geometry};
use moe_engine::{AttentionSpec, ModelSpec};
use moe_quant::{Format, Reader, dequantise};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::progress;
use crate::report::Report;
use crate::source::{Source, to_f32};
use file::GgufFile;
use mix::Stored;
use outputs::{Output, Part};

pub use mix::GgufMix;

/// Reads the float checkpoint in `model` and writes it, with its config and its tokenizer, as the GGUF file `out`. The
/// file appears when it is complete. Weights are rounded to nearest.
///
/// Memory holds one tensor of the source and its blocks. Before weights are read, the header is read back and compared
/// with the source.
///
/// # Errors
/// The source is quantised or is not a checkpoint of a known model; the family has no names in GGUF files, or metadata
/// cannot say what its config says; the tokenizer is no byte-level BPE; `out` exists or is not called `.gguf`; there is
/// too little space; weights are not finite.
pub fn quantize_gguf(model: &Path, out: &Path, mix: GgufMix) -> Result<Report> {
    let source = Source::open(model)?;
    let model_type = source.config["model_type"].as_str().unwrap_or_default();
    let Some(names) = GgufNames::of_model_type(model_type) else {
        let known: Vec<_> = GgufNames::model_types().collect();
        bail!(
            "{}: models of type {model_type:?} are not written as GGUF files; written are {}",
            model.display(),
            known.join(", ")
        )
    };
    let (outputs, bytes) = outputs::outputs(&source, &names, mix)?;
    let mut header = metadata::network(&source, &names, mix).with_context(|| model.display().to_string())?;
    header.extend(tokenizer::tokenizer(&source)?);
    let mut report = Report { notes: source.notes.clone(), ..Report::default() };
    report.bytes = (bytes, outputs.iter().map(|output| output.bytes() as u64).sum());
    let mut file = GgufFile::create(out, &header, &outputs)?;
    check(&source, file.path())?;
    tokenizer::check(&source, file.path())?;
    let bar = progress::bar("tensors", outputs.len());
    for output in &outputs {
        write(&source, output, &mut file, &mut report)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    file.finish()?;
    Ok(report)
}

/// Fails if a reader of the file, which may have only its header, would run another model than the source's.
fn check(source: &Source, file: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(file)?;
    let read = model_families::ALL.parse(&checkpoint.config)?;
    let wanted = described(source.model.as_ref());
    for ((what, wanted), (_, got)) in wanted.into_iter().zip(described(read.as_ref())) {
        if wanted != got {
            bail!(
                "{}: a GGUF file cannot say what config.json says of {what}: expected {wanted}, but it means {got}",
                source.dir.display()
            )
        }
    }
    let layout = read.layout(&Geometry::default(), &|name| checkpoint.has(name))?;
    checkpoint.verify(&layout.tensors, read.ignored())?;
    Ok(())
}

/// Describes everything on which the results of a model depend.
fn described(model: &dyn ModelSpec) -> [(&'static str, String); 7] {
    let decoder = model.decoder();
    let has_dense = decoder.is_sparse.iter().any(|is_sparse| !is_sparse);
    let dense = has_dense.then_some(decoder.intermediate_size);
    let attention = match model.attention() {
        AttentionSpec::Layers(layers) => format!("{layers:?}"),
        AttentionSpec::Latent(latent) => format!("{latent:?}"),
    };
    [
        ("sizes", format!("{:?}", [decoder.vocab_size, decoder.hidden_size])),
        ("dense layers", format!("{:?} {dense:?}", decoder.is_sparse)),
        ("activations", format!("{:?}", decoder.activation)),
        ("norms", format!("{} {}", decoder.rms_norm_eps, decoder.zero_centred_norms)),
        ("rotary positions", format!("{:?}", decoder.rope)),
        ("experts", format!("{:?}", decoder.moe)),
        ("attention", attention),
    ]
}

/// Writes a tensor of the file.
fn write(source: &Source, output: &Output, file: &mut GgufFile, report: &mut Report) -> Result<()> {
    let name = || format!("tensor {}", output.name);
    let mut written = 0;
    for part in &output.parts {
        let weights = to_f32(&read(source, part)?)?;
        let bytes = match output.stored {
            Stored::F32 => weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
            Stored::F16 => halves(&weights).with_context(name)?,
            Stored::Blocks(ggml) => {
                let columns = output.shape.last().copied().unwrap_or_default();
                let blocks = encode::encode(ggml, &weights, columns).with_context(name)?;
                let rows = weights.len() / columns.max(1);
                let shape = vec![rows, blocks.len() / rows.max(1)];
                let view = TensorView::new(Dtype::U8, shape, &blocks)?;
                let find = |suffix: &str| (suffix == "weight").then(|| view.clone());
                let reader = Reader::new(&output.name, Format::Ggml(ggml), (rows, columns), find)?;
                report.add(&weights, &dequantise(&reader)?);
                blocks
            }
        };
        written += bytes.len();
        file.write(&bytes)?;
    }
    if output.stored == Stored::F16 {
        report.kept.push(output.name.clone());
    }
    if written != output.bytes() {
        bail!("tensor {}: expected {} bytes, got {written}", output.name, output.bytes())
    }
    file.end_tensor(written)
}

/// Reads a part of the source.
fn read(source: &Source, part: &Part) -> Result<Tensor> {
    let tensor = source.tensors.tensor(&part.tensor)?;
    let (share, shares) = part.share;
    if shares == 1 {
        return Ok(tensor);
    }
    let rows = tensor.dim(1)? / shares;
    Ok(tensor.narrow(1, share * rows, rows)?.contiguous()?)
}

/// Returns weights in F16.
///
/// # Errors
/// A weight is not finite in F16.
fn halves(weights: &[f32]) -> Result<Vec<u8>> {
    let halves: Vec<f16> = weights.iter().map(|w| f16::from_f32(*w)).collect();
    if let Some(at) = halves.iter().position(|half| !half.is_finite()) {
        bail!("weight {} is not finite in F16, which rows that no block divides have", weights[at])
    }
    Ok(halves.iter().flat_map(|half| half.to_le_bytes()).collect())
}
