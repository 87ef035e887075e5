//! Some containers store other values than the model's code reads. A [`Change`] restores them when a tensor is read.

use candle_core::{DType, Result, Tensor, bail};

/// A function of each value of a stored tensor. The tensors that are changed are vectors of a few thousand values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Change {
    /// The value stays as it is.
    #[default]
    None,
    /// x - 1: a norm multiplies by 1 + weight, and the file holds the sum.
    MinusOne,
    /// ln(-x): the model has the logarithm of a decay, and the file holds the negative decay.
    LogOfNegative,
}

impl Change {
    /// Returns the changed values of `stored`, which has a float dtype, as a tensor of `dtype`. It computes in f32.
    ///
    /// # Errors
    /// A value that has no logarithm.
    pub fn apply(self, name: &str, stored: Tensor, dtype: DType) -> Result<Tensor> {
        let changed = match self {
            Self::None => stored,
            Self::MinusOne => (stored.to_dtype(DType::F32)? - 1.0)?,
            Self::LogOfNegative => {
                let positive = stored.to_dtype(DType::F32)?.neg()?;
                let values = positive.flatten_all()?.to_vec1::<f32>()?;
                if let Some(value) = values.iter().find(|value| !(**value > 0.0 && value.is_finite())) {
                    bail!("tensor `{name}`: expected -exp(A_log), numbers below 0, got {}", -value)
                }
                positive.log()?
            }
        };
        changed.to_dtype(dtype)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn values_are_those_before_the_conversion() -> Result<()> {
        let changed = |change: Change, values: &[f32]| -> Result<Vec<f32>> {
            let stored = Tensor::new(values, &Device::Cpu)?;
            change.apply("x", stored, DType::F32)?.to_vec1()
        };
        assert_eq!(changed(Change::None, &[-3.0])?, [-3.0]);
        assert_eq!(changed(Change::MinusOne, &[1.0, 0.75])?, [0.0, -0.25]);
        assert_eq!(changed(Change::LogOfNegative, &[-1.0, -2.0])?, [0.0, 2f32.ln()]);
        for wrong in [0.0, 1.0, f32::NAN, f32::NEG_INFINITY] {
            let error = changed(Change::LogOfNegative, &[-1.0, wrong]).unwrap_err().to_string();
            assert!(error.contains("tensor `x`: expected -exp(A_log)"), "{error}");
        }
        Ok(())
    }
}
