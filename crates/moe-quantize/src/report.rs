//! The report of a run, as text and as a JSON file in the checkpoint's folder.

use serde_json::{Value, json};

use crate::settings::{Method, Settings};

/// The name of the report in the checkpoint's folder.
pub const FILE: &str = "quantization_report.json";

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The number of linear layers that are quantised.
    pub quantised: usize,
    /// The names of the linear layers that stay in floats.
    pub kept: Vec<String>,
    /// The modules that were rounded to nearest although calibration was requested, and the reasons.
    pub fallback: Vec<(String, String)>,
    /// The sum of the squared errors of all quantised weights.
    pub squared_error: f64,
    /// The sum of the squares of all quantised weights.
    pub squared_weights: f64,
    /// The number of modules that were calibrated, and the sum of the relative squared errors of their outputs on the
    /// calibration text.
    pub calibrated: (usize, f64),
    /// The bytes of the source's tensors and of the written tensors.
    pub bytes: (u64, u64),
    /// Sentences about unusual properties of the source.
    pub notes: Vec<String>,
}

impl Report {
    /// Counts the weights of a layer. `rounded` are the weights that its integers mean.
    pub fn add(&mut self, weights: &[f32], rounded: &[f32]) {
        self.quantised += 1;
        self.squared_weights += weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>();
        self.squared_error += weights.iter().zip(rounded).map(|(w, r)| f64::from(w - r).powi(2)).sum::<f64>();
    }

    /// Counts the relative squared error of a calibrated module's outputs.
    pub fn add_output_error(&mut self, error: f64) {
        self.calibrated = (self.calibrated.0 + 1, self.calibrated.1 + error);
    }

    /// Returns the mean of the relative squared errors of the calibrated modules' outputs, or `None` without
    /// calibration.
    pub fn output_error(&self) -> Option<f64> {
        (self.calibrated.0 > 0).then(|| self.calibrated.1 / self.calibrated.0 as f64)
    }

    /// Returns the root of the mean squared error of the weights, relative to the root of the mean squared weight.
    pub fn relative_error(&self) -> f64 {
        (self.squared_error / self.squared_weights.max(f64::MIN_POSITIVE)).sqrt()
    }

    /// Returns the report as JSON.
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

    /// Returns the report as a few lines of text.
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
