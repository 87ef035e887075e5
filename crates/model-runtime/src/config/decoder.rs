//! What the configs of all families say alike about the model as a whole.

use super::error::ConfigError;
use super::value::Config;

/// Default of `rms_norm_eps`, as in transformers.
const DEFAULT_EPS: f64 = 1e-6;

impl Config {
    /// Epsilon of the norms between layers, under `rms_norm_eps`.
    ///
    /// # Errors
    /// A negative one.
    pub fn rms_norm_eps(&self) -> Result<f64, ConfigError> {
        let eps = self.float_or(&["rms_norm_eps"], DEFAULT_EPS)?;
        if eps < 0. {
            return Err(self.invalid("rms_norm_eps", "a number of at least 0", eps));
        }
        Ok(eps)
    }
}
