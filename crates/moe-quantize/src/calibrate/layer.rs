//! A decoder layer that is being quantised: its weights in f32, and what becomes of each.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};
use moe_quant::Format;
use moe_quant::write::IntMatrix;
use safetensors::Dtype;

use super::Calibration;
use super::weights::Weights;
use crate::convert::{Job, part};
use crate::gptq::{Feedback, Hessian, gptq};
use crate::plan::{Item, Linear};
use crate::round::{Grid, round_to_nearest};
use crate::source::to_f32;

/// The inputs that some modules share, and what the first of them made of these.
type Seen = (Hessian, Option<Feedback>);

/// A layer. Modules are named below its prefix, such as `self_attn.q_proj`.
pub struct Layer<'a, 'b> {
    job: &'a mut Job<'b>,
    calibration: &'a Calibration,
    /// The weights; of a module that is quantised already, the floats that its integers mean.
    pub weights: Weights,
    /// What is still to be quantised.
    waiting: BTreeMap<String, (Linear, Dtype)>,
}

impl<'a, 'b> Layer<'a, 'b> {
    /// Loads the tensors of `items`, whose names begin with `prefix`, and writes those that stay in floats.
    ///
    /// # Errors
    /// I/O.
    pub fn load(
        job: &'a mut Job<'b>,
        calibration: &'a Calibration,
        prefix: &str,
        items: Vec<(Item, Dtype)>,
    ) -> Result<Self> {
        let (mut weights, mut waiting) = (Weights::default(), BTreeMap::new());
        let below = |name: &str| name.strip_prefix(prefix).unwrap_or(name).to_string();
        for (item, dtype) in items {
            let tensor = job.read(&item)?;
            if item.linears.is_empty() {
                job.copy(&item, dtype, &tensor)?;
                weights.0.insert(below(&item.source.name), tensor.to_dtype(DType::F32)?);
            }
            for linear in item.linears {
                let part = part(&tensor, &linear)?;
                let module = below(&linear.module);
                weights.0.insert(format!("{module}.weight"), part.to_dtype(DType::F32)?);
                match linear.format {
                    Format::Plain => job.keep(&linear, dtype, &part)?,
                    _ => drop(waiting.insert(module, (linear, dtype))),
                }
            }
        }
        Ok(Self { job, calibration, weights, waiting })
    }

    /// Quantises the modules that still wait for it, for the inputs [T, k] f32 that they share.
    ///
    /// # Errors
    /// Weights or inputs that are not finite; I/O.
    pub fn quantise(&mut self, modules: &[&str], inputs: &Tensor) -> Result<()> {
        if !modules.iter().any(|module| self.waiting.contains_key(*module)) {
            return Ok(());
        }
        let (rows, least) = (inputs.dims()[0], self.calibration.min_tokens);
        let mut seen = match rows >= least {
            true => Ok((Hessian::of(inputs)?, None)),
            false => Err(format!("saw {rows} tokens of the calibration text, fewer than {least}")),
        };
        modules.iter().try_for_each(|module| self.quantise_one(module, &mut seen))
    }

    fn quantise_one(&mut self, module: &str, seen: &mut Result<Seen, String>) -> Result<()> {
        let Some((linear, dtype)) = self.waiting.remove(module) else { return Ok(()) };
        let (name, n, k) = (format!("{module}.weight"), linear.n, linear.k);
        let weights = to_f32(self.weights.get(&name)?)?;
        let grid = Grid::new(linear.format, self.job.scale_dtype(dtype))?;
        let calibrated = match seen {
            Ok(seen) => self.calibrate(seen, &grid, &weights, (n, k)).map_err(|error| error.to_string()),
            Err(why) => Err(why.clone()),
        };
        let matrix = match calibrated {
            Ok((matrix, error)) => {
                self.job.report.add_output_error(error);
                matrix
            }
            Err(why) => {
                self.job.report.fallback.push((linear.module.clone(), why));
                round_to_nearest(&grid, &weights, n, k)
                    .map_err(|error| error.context(linear.module.clone()))?
            }
        };
        self.job.write_linear(&linear, dtype, &weights, &matrix)?;
        self.weights.0.insert(name, Tensor::from_vec(matrix.weights(), (n, k), &Device::Cpu)?);
        Ok(())
    }

    /// The integers of a module, and the relative squared error of its outputs.
    fn calibrate(
        &self,
        (hessian, feedback): &mut Seen,
        grid: &Grid,
        weights: &[f32],
        (n, k): (usize, usize),
    ) -> Result<(IntMatrix, f64)> {
        let made = match feedback.take() {
            Some(made) => made,
            None => Feedback::new(hessian, self.job.desc_act(), self.calibration.damping)?,
        };
        let matrix = gptq(grid, weights, (n, k), feedback.insert(made))?;
        let error = hessian.output_error(weights, &matrix.weights())?;
        Ok((matrix, error))
    }

    /// Ends the layer.
    ///
    /// # Errors
    /// A module that no inputs were shown for: the model runs it, and calibration does not.
    pub fn finish(self) -> Result<()> {
        match self.waiting.into_keys().next() {
            None => Ok(()),
            Some(module) => {
                bail!("calibration does not know the inputs of {module}; use --method rtn, or --ignore it")
            }
        }
    }
}
