//! The names of a quantised matrix's tensors.

use moe_kernels::quant::StoredTensor;

/// Returns the possible ends of the name of a tensor, after the module's name and a dot. Formats use different ones.
pub fn suffixes(tensor: StoredTensor) -> &'static [&'static str] {
    match tensor {
        StoredTensor::Codes => &["qweight", "weight_packed", "weight"],
        StoredTensor::Zeros => &["qzeros", "weight_zero_point"],
        StoredTensor::Scales => &["scales", "weight_scale", "weight_scale_inv"],
    }
}
