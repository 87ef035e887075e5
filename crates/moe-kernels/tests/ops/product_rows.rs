//! The rows of a product on the CPU, which a build with CUDA makes by the same rules as one without.

use candle_core::{DType, Device, Result, Tensor};
use moe_kernels::quant::QuantUse;
use moe_kernels::{CpuIsa, Exec, ProductRows, QuantGroup, QuantScheme, Weight, WeightOrder};

use crate::quantised::{Plain, int, pack};

#[test]
fn rows_are_floats_for_weights_in_rows_in_panels_and_quantised() -> Result<()> {
    let n = 32;
    let k = 128;
    let ex = Exec::cpu();
    let rows = Weight::new(Tensor::zeros((n, k), DType::F32, &Device::Cpu)?)?;
    let panels = rows.clone().packed(Some(CpuIsa::Avx2), n)?;
    assert_eq!(panels.order(), WeightOrder::Panels);
    let mut weights = vec![rows, panels];
    for scheme in [int(4, 32, true, false), QuantScheme::fp8(QuantGroup::Tensor)] {
        let matrix = pack(&Plain::new(n, k, scheme, true, 7), QuantUse::Linear)?;
        weights.push(Weight::of_quantised(matrix, DType::F32)?);
    }
    for weight in weights {
        let made = ProductRows::of_product(3, weight.read()?.view()?, false, &ex)?;
        let floats = made.rows().floats("a test")?;
        assert_eq!((floats.dims(), floats.dtype()), (&[3, k][..], DType::F32), "{}", weight.scheme());
    }
    Ok(())
}
