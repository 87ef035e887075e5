//! Settings of the model as a whole that the configs of all families have in common.

use super::error::ConfigError;
use super::value::Config;

/// Default of `rms_norm_eps` in most models of transformers.
const DEFAULT_EPS: f64 = 1e-6;

impl Config {
    /// Epsilon of the norms between layers, under `rms_norm_eps`; 1e-6 where it is absent.
    ///
    /// # Errors
    /// A negative one.
    pub fn rms_norm_eps(&self) -> Result<f64, ConfigError> {
        self.rms_norm_eps_or(DEFAULT_EPS)
    }

    /// [`rms_norm_eps`](Self::rms_norm_eps) for a family with another default.
    ///
    /// # Errors
    /// A negative one.
    pub fn rms_norm_eps_or(&self, default: f64) -> Result<f64, ConfigError> {
        let eps = self.float_or(&["rms_norm_eps"], default)?;
        if eps < 0. {
            return Err(self.invalid("rms_norm_eps", "a number of at least 0", eps));
        }
        Ok(eps)
    }
}
