//! A checkpoint that is being quantised: its source, the plan for each tensor, and the files that are written.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::Tensor;
use moe_quant::write::{IntMatrix, pack};
use moe_quant::{Format, Reader, dequantise};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::fp4::round_fp4;
use crate::plan::{Item, Linear, Part, Plan, plan};
use crate::report::{self, Report};
use crate::round::{Grid, round_to_nearest};
use crate::settings::Settings;
use crate::source::{Source, to_f32};
use crate::write::{CheckpointWriter, Files};

/// A checkpoint that is being quantised.
pub struct Job<'a> {
    source: &'a Source,
    settings: &'a Settings,
    /// The plan for each tensor, with the dtype of the source tensor.
    pub items: Vec<(Item, Dtype)>,
    untied: bool,
    header: Value,
    writer: CheckpointWriter,
    /// The report of the work so far.
    pub report: Report,
}

impl<'a> Job<'a> {
    /// Plans the checkpoint and writes the headers of its files. The files have the same names as in the source.
    ///
    /// # Errors
    /// Settings or sizes do not fit, or the folder cannot be created.
    pub fn begin(source: &'a Source, out: &Path, settings: &'a Settings) -> Result<Self> {
        let mut files = Files::new();
        let mut report = Report { notes: source.notes.clone(), ..Report::default() };
        let mut specs = Vec::new();
        let mut places = BTreeMap::new();
        for (file, tensors) in source.files()? {
            for (spec, dtype) in tensors {
                report.bytes.0 += (spec.shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
                places.insert(spec.name.clone(), (file.clone(), dtype));
                specs.push(spec);
            }
        }
        let is_tied = source.model.decoder().tie_word_embeddings;
        let Plan { items: planned, untied, header } =
            plan(specs, &source.model.decoder().names, is_tied, settings)?;
        let mut items = Vec::new();
        for item in planned {
            let name = &item.source.name;
            let (file, dtype) = places.get(name).with_context(|| format!("tensor {name} is in no file"))?;
            let outputs = item.outputs(settings, *dtype)?;
            report.bytes.1 += outputs.iter().map(|(_, spec)| spec.len() as u64).sum::<u64>();
            files.entry(file.clone()).or_default().extend(outputs);
            items.push((item, *dtype));
        }
        let writer = CheckpointWriter::create(out, &files)?;
        Ok(Self { source, settings, items, untied, header, writer, report })
    }

    /// Reads the source tensor of an item.
    ///
    /// # Errors
    /// Reading the source fails.
    pub fn read(&self, item: &Item) -> Result<Tensor> {
        Ok(self.source.tensors.tensor(&item.source.name)?)
    }

    /// Returns the dtype of the scales for weights of a dtype.
    pub fn scale_dtype(&self, weights: Dtype) -> Dtype {
        self.settings.scale_dtype(weights)
    }

    /// Returns whether columns with large inputs are rounded first.
    pub fn desc_act(&self) -> bool {
        self.settings.desc_act
    }

    /// Writes a tensor unchanged.
    ///
    /// # Errors
    /// Writing fails.
    pub fn copy(&mut self, item: &Item, dtype: Dtype, tensor: &Tensor) -> Result<()> {
        self.report.kept.extend(kept(item));
        self.writer.write(&item.source.name, &bytes(tensor, dtype)?)
    }

    /// Writes a linear layer in floats. `weights` is [n, k].
    ///
    /// # Errors
    /// Writing fails.
    pub fn keep(&mut self, linear: &Linear, dtype: Dtype, weights: &Tensor) -> Result<()> {
        self.report.kept.push(linear.module.clone());
        self.writer.write(&format!("{}.weight", linear.module), &bytes(weights, dtype)?)
    }

    /// Writes a linear layer rounded to nearest, or in floats if its format is plain. `weights` is [n, k].
    ///
    /// # Errors
    /// Weights are not finite, or writing fails.
    pub fn round(&mut self, linear: &Linear, dtype: Dtype, weights: &Tensor) -> Result<()> {
        if linear.format == Format::Plain {
            return self.keep(linear, dtype, weights);
        }
        let weights = to_f32(weights)?;
        if linear.format.int().is_none() {
            return self.write_fp4(linear, &weights);
        }
        let grid = Grid::new(linear.format, self.scale_dtype(dtype))?;
        let matrix =
            round_to_nearest(&grid, &weights, linear.n, linear.k).with_context(|| linear.module.clone())?;
        self.write_linear(linear, dtype, &weights, &matrix)
    }

    /// Writes a linear layer in floats of 4 bits. The report compares with what a reader finds.
    fn write_fp4(&mut self, linear: &Linear, weights: &[f32]) -> Result<()> {
        let tensors = round_fp4(linear, weights).with_context(|| linear.module.clone())?;
        let find = |suffix: &str| {
            let tensor = tensors.iter().find(|tensor| tensor.spec.suffix == suffix)?;
            TensorView::new(tensor.spec.dtype, tensor.spec.shape.clone(), &tensor.bytes).ok()
        };
        let reader = Reader::new(&linear.module, linear.format, (linear.n, linear.k), find)?;
        self.report.add(weights, &dequantise(&reader)?);
        for tensor in &tensors {
            self.writer.write(&format!("{}.{}", linear.module, tensor.spec.suffix), &tensor.bytes)?;
        }
        Ok(())
    }

    /// Writes a linear layer in integers.
    ///
    /// # Errors
    /// The integers do not fit the format, or writing fails.
    pub fn write_linear(
        &mut self,
        linear: &Linear,
        dtype: Dtype,
        weights: &[f32],
        matrix: &IntMatrix,
    ) -> Result<()> {
        self.report.add(weights, &matrix.weights()?);
        let scales = self.settings.scale_dtype(dtype);
        for tensor in pack(&linear.module, linear.format, matrix, scales)? {
            self.writer.write(&format!("{}.{}", linear.module, tensor.spec.suffix), &tensor.bytes)?;
        }
        Ok(())
    }

    /// Writes the config, the report and the other files, and gives the folder its final name.
    ///
    /// # Errors
    /// A tensor was not written, or writing fails.
    pub fn finish(self) -> Result<Report> {
        let mut config = self.source.config.clone();
        if let Some(map) = config.as_object_mut() {
            map.insert("quantization_config".to_string(), self.header);
            if self.untied {
                map.insert("tie_word_embeddings".to_string(), Value::Bool(false));
            }
        }
        self.writer.copy_companions(&self.source.dir)?;
        let report = serde_json::to_string_pretty(&self.report.json(self.settings))? + "\n";
        self.writer.write_file(report::FILE, report.as_bytes())?;
        self.writer.finish(&config)?;
        Ok(self.report)
    }
}

/// Returns the name of the module if its matrix stays in floats.
fn kept(item: &Item) -> Option<String> {
    let module = item.source.name.strip_suffix(".weight")?;
    (item.source.shape.len() == 2 && module.contains("layers.")).then(|| module.to_string())
}

/// Returns the weights [n, k] of a linear layer, which are a part of a tensor.
pub fn part(tensor: &Tensor, linear: &Linear) -> Result<Tensor> {
    Ok(match &linear.part {
        Part::Whole => tensor.clone(),
        Part::Expert(expert, rows) => tensor.get(*expert)?.narrow(0, rows.start, rows.len())?.contiguous()?,
    })
}

/// Returns the bytes of a float tensor that has the dtype `dtype`.
pub fn bytes(tensor: &Tensor, dtype: Dtype) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match dtype {
        Dtype::BF16 => flat.to_vec1::<half::bf16>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F16 => flat.to_vec1::<half::f16>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => flat.to_vec1::<f32>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
    })
}
