//! The names of a quantised matrix's tensors.

use moe_kernels::quant::StoredTensor;

/// What follows the module's name and a dot in the name of a tensor, in one format or another.
pub fn suffixes(tensor: StoredTensor) -> &'static [&'static str] {
    match tensor {
        StoredTensor::Codes => &["qweight", "weight_packed", "weight"],
        StoredTensor::Zeros => &["qzeros", "weight_zero_point"],
        StoredTensor::Scales => &["scales", "weight_scale", "weight_scale_inv"],
    }
}
