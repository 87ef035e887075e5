//! A decoder layer that is being quantised: its weights in f32, and the state of each module.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use moe_quant::Format;
use safetensors::Dtype;

use super::weights::Weights;
use crate::gptq::{Feedback, Hessian, NoFactor, gptq};
use crate::job::{Job, part};
use crate::plan::{Item, Linear};
use crate::round::{Grid, round_to_nearest};
use crate::settings::Calibration;
use crate::source::to_f32;

/// The data that GPTQ needs about the inputs which some modules share. The error is the reason why these modules are
/// rounded to nearest instead.
type Seen = Result<(Hessian, Feedback), String>;

/// A layer. The names of modules are relative to its prefix, such as `self_attn.q_proj`.
pub struct Layer<'a, 'b> {
    job: &'a mut Job<'b>,
    calibration: &'a Calibration,
    /// The weights. For a module that is already quantised, they are the floats that its integers mean.
    pub weights: Weights,
    /// The modules that are not quantised yet.
    waiting: BTreeMap<String, (Linear, Dtype)>,
}

impl<'a, 'b> Layer<'a, 'b> {
    /// Loads the tensors of `items`, whose names begin with `prefix`, and writes the tensors that stay in floats.
    ///
    /// # Errors
    /// Reading or writing fails.
    pub fn load(
        job: &'a mut Job<'b>,
        calibration: &'a Calibration,
        prefix: &str,
        items: Vec<(Item, Dtype)>,
    ) -> Result<Self> {
        let mut weights = Weights::default();
        let mut waiting = BTreeMap::new();
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

    /// Quantises the modules among `modules` that are not quantised yet, for the inputs [T, k] f32 that they share.
    ///
    /// # Errors
    /// Weights or inputs are not finite, the damping is invalid, or writing fails. Too few tokens, and inputs without a
    /// Cholesky factor, are not errors: the report lists these modules.
    pub fn quantise(&mut self, modules: &[&str], inputs: &Tensor) -> Result<()> {
        if !modules.iter().any(|module| self.waiting.contains_key(*module)) {
            return Ok(());
        }
        let seen = self.see(inputs)?;
        modules.iter().try_for_each(|module| self.quantise_one(module, &seen))
    }

    fn see(&self, inputs: &Tensor) -> Result<Seen> {
        let rows = inputs.dims()[0];
        let least = self.calibration.min_tokens;
        if rows < least {
            return Ok(Err(format!("saw {rows} tokens of the calibration text, fewer than {least}")));
        }
        let hessian = Hessian::of(inputs)?;
        match Feedback::new(&hessian, self.job.desc_act(), self.calibration.damping) {
            Ok(feedback) => Ok(Ok((hessian, feedback))),
            Err(error) if error.is::<NoFactor>() => Ok(Err(error.to_string())),
            Err(error) => Err(error),
        }
    }

    fn quantise_one(&mut self, module: &str, seen: &Seen) -> Result<()> {
        let Some((linear, dtype)) = self.waiting.remove(module) else { return Ok(()) };
        let name = format!("{module}.weight");
        let n = linear.n;
        let k = linear.k;
        let weights = to_f32(self.weights.get(&name)?)?;
        let grid = Grid::new(linear.format, self.job.scale_dtype(dtype))?;
        let named = || linear.module.clone();
        let matrix = match seen {
            Ok((hessian, feedback)) => {
                let matrix = gptq(&grid, &weights, (n, k), feedback).with_context(named)?;
                let error = hessian.output_error(&weights, &matrix.weights()?).with_context(named)?;
                self.job.report.add_output_error(error);
                matrix
            }
            Err(why) => {
                self.job.report.fallback.push((named(), why.clone()));
                round_to_nearest(&grid, &weights, n, k).with_context(named)?
            }
        };
        self.job.write_linear(&linear, dtype, &weights, &matrix)?;
        self.weights.0.insert(name, Tensor::from_vec(matrix.weights()?, (n, k), &Device::Cpu)?);
        Ok(())
    }

    /// Finishes the layer.
    ///
    /// # Errors
    /// A module was never given inputs. The model runs it, but calibration does not.
    pub fn finish(self) -> Result<()> {
        match self.waiting.into_keys().next() {
            None => Ok(()),
            Some(module) => {
                bail!(
                    "calibration does not know the inputs of {module}; use `method` rtn, or name it in `ignore`"
                )
            }
        }
    }
}
