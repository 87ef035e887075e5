//! What a run did, for people and as JSON beside the weights.

use serde_json::{Value, json};

use crate::settings::{Method, Settings};

/// The file in the checkpoint's folder.
pub const FILE: &str = "quantization_report.json";

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Linear layers that are quantised.
    pub quantised: usize,
    /// Linear layers that stay in floats.
    pub kept: Vec<String>,
    /// Modules that were rounded to nearest although calibration was asked for, and why.
    pub fallback: Vec<(String, String)>,
    /// Sum of the squared errors of all quantised weights.
    pub squared_error: f64,
    /// Sum of the squares of all quantised weights.
    pub squared_weights: f64,
    /// Modules that were calibrated, and the sum of the relative squared errors of their outputs on the calibration text.
    pub calibrated: (usize, f64),
    /// Bytes of the source's tensors, and of the written tensors.
    pub bytes: (u64, u64),
    /// What is odd about the source, in sentences.
    pub notes: Vec<String>,
}

impl Report {
    /// Counts a layer's weights, and as `rounded` the weights that its integers mean.
    pub fn add(&mut self, weights: &[f32], rounded: &[f32]) {
        self.quantised += 1;
        self.squared_weights += weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>();
        self.squared_error += weights.iter().zip(rounded).map(|(w, r)| f64::from(w - r).powi(2)).sum::<f64>();
    }

    /// Counts the relative squared error of a calibrated module's outputs.
    pub fn add_output_error(&mut self, error: f64) {
        self.calibrated = (self.calibrated.0 + 1, self.calibrated.1 + error);
    }

    /// Mean of the relative squared errors of calibrated modules' outputs; `None` without calibration.
    pub fn output_error(&self) -> Option<f64> {
        (self.calibrated.0 > 0).then(|| self.calibrated.1 / self.calibrated.0 as f64)
    }

    /// Root of the mean squared error of weights, as a share of the weights' own.
    pub fn relative_error(&self) -> f64 {
        (self.squared_error / self.squared_weights.max(f64::MIN_POSITIVE)).sqrt()
    }

    /// The report as JSON.
    pub fn json(&self, settings: &Settings) -> Value {
        let fallback: Vec<_> =
            self.fallback.iter().map(|(module, why)| json!({"module": module, "reason": why})).collect();
        json!({
            "method": if matches!(settings.method, Method::Gptq(_)) { "gptq" } else { "rtn" },
            "quantised_modules": self.quantised,
            "modules_in_floats": self.kept,
            "relative_weight_error": self.relative_error(),
            "calibrated_modules": self.calibrated.0,
            "mean_relative_squared_output_error": self.output_error(),
            "rounded_to_nearest_instead": fallback,
            "source_bytes": self.bytes.0,
            "written_bytes": self.bytes.1,
            "notes": self.notes,
        })
    }

    /// A few lines for people.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{} linear layers quantised, relative error of their weights {:.4}; {:.1} MB became {:.1} MB",
            self.quantised,
            self.relative_error(),
            self.bytes.0 as f64 / 1e6,
            self.bytes.1 as f64 / 1e6
        );
        if let Some(error) = self.output_error() {
            text += &format!(
                "\n{} calibrated, mean relative squared error of their outputs {error:.5}",
                self.calibrated.0
            );
        }
        if !self.kept.is_empty() {
            text += &format!("\n{} linear layers stay in floats, such as {}", self.kept.len(), self.kept[0]);
        }
        if !self.fallback.is_empty() {
            text +=
                &format!("\n{} modules were rounded to nearest instead of calibrated:", self.fallback.len());
            self.fallback.iter().for_each(|(module, why)| text += &format!("\n  {module}: {why}"));
        }
        self.notes.iter().for_each(|note| text += &format!("\nnote: {note}"));
        text
    }
}
