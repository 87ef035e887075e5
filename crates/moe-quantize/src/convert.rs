//! Quantises a checkpoint, either by rounding to nearest, tensor by tensor, or with calibration.

use std::path::Path;

use anyhow::{Result, bail};

use crate::calibrate;
use crate::job::{Job, part};
use crate::progress;
use crate::report::Report;
use crate::settings::{Method, Settings};
use crate::source::Source;

/// Reads the float checkpoint in `model` and writes it quantised to `out`. This folder appears when it is complete.
///
/// Memory holds one tensor of the source and its integers. With calibration it holds one layer and the hidden states of
/// the text.
///
/// # Errors
/// The source is already quantised or is not a checkpoint of a known model, the settings or sizes do not fit, `out`
/// exists, there is too little space, or weights are not finite.
pub fn quantize(model: &Path, out: &Path, settings: &Settings) -> Result<Report> {
    if settings.desc_act && matches!(settings.method, Method::Rtn) {
        bail!("`desc_act`: the order of columns comes from calibration; use `method` gptq")
    }
    let source = Source::open(model)?;
    let mut job = Job::begin(&source, out, settings)?;
    match &settings.method {
        Method::Rtn => round_all(&mut job)?,
        Method::Gptq(calibration) => calibrate::run(&source, &mut job, calibration)?,
    }
    job.finish()
}

fn round_all(job: &mut Job) -> Result<()> {
    let bar = progress::bar("tensors", job.items.len());
    for (item, dtype) in std::mem::take(&mut job.items) {
        let tensor = job.read(&item)?;
        if item.linears.is_empty() {
            job.copy(&item, dtype, &tensor)?;
        }
        for linear in &item.linears {
            job.round(linear, dtype, &part(&tensor, linear)?)?;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}
