//! Every call on tensors, on the CPU: inputs that are not contiguous give the bits of contiguous ones, and what only
//! some devices or layouts take is a clear error.

use candle_core::{DType, Device, Tensor};
use moe_tests::doors::{Case, LARGE, LAYOUTS, Layout, SMALL, Sizes, assert_close, calls};

fn check(sizes: &[Sizes], dtypes: &[DType]) {
    for (name, call) in calls() {
        for &sizes in sizes {
            for &dtype in dtypes {
                let run = |layout| {
                    let what = format!("{name}, {dtype:?}, {layout:?}, {sizes:?}");
                    let case = Case::new(&Device::Cpu, dtype, layout, sizes);
                    (call(&case).unwrap_or_else(|e| panic!("{what}: {e}")), what)
                };
                let (want, _) = run(Layout::Contiguous);
                for layout in LAYOUTS {
                    let (got, what) = run(layout);
                    assert_close(&what, &want, &got, 0.);
                }
            }
        }
    }
}

#[test]
fn any_layout_gives_the_bits_of_contiguous_inputs() {
    check(&SMALL, &[DType::F32, DType::BF16, DType::F16]);
    check(&LARGE[1..2], &[DType::BF16]);
}

#[test]
fn inputs_of_wrong_width_are_named() {
    let case = Case::new(&Device::Cpu, DType::F32, Layout::Contiguous, SMALL[0]);
    let norm = model_runtime::RmsNorm::new(case.weight(&[64], 1.).unwrap(), 1e-6).unwrap();
    let e = norm.forward(&Tensor::zeros((2, 63), DType::F32, &Device::Cpu).unwrap()).unwrap_err().to_string();
    assert!(e.contains("63") && e.contains("64"), "{e}");
}
