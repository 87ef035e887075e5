//! Every call on tensors, on the CPU: inputs that are not contiguous give the bits of contiguous ones, and an
//! unsupported device or layout is a clear error.

use candle_core::{DType, Device, Tensor};
use moe_tests::tensor_calls::{Case, LARGE, LAYOUTS, Layout, SMALL, Sizes, Variables, assert_close, calls};

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

/// candle would treat the results of a call as constants; instead `backward()` reports that there is no gradient.
#[test]
fn backward_through_any_call_fails_where_a_variable_is_behind_it() {
    let backward = |result: &Tensor| {
        let sum = result.to_dtype(DType::F32).and_then(|x| x.sum_all()).unwrap();
        sum.backward().map(drop).map_err(|e| e.to_string())
    };
    for (name, call) in calls() {
        for layout in [Layout::Contiguous, Layout::Columns] {
            for variables in [Variables::None, Variables::Inputs, Variables::Weights, Variables::Detached] {
                let what = format!("{name}, {layout:?}, {variables:?}");
                let case = Case::new(&Device::Cpu, DType::F32, layout, SMALL[1]).with(variables);
                let results = call(&case).unwrap_or_else(|e| panic!("{what}: {e}"));
                for result in results.iter().filter(|result| result.dtype().is_float()) {
                    match (backward(result), case.made_variables()) {
                        (Ok(()), false) => {}
                        (Err(error), true) => assert!(error.contains("have no gradient"), "{what}: {error}"),
                        (got, _) => panic!("{what}: {got:?}"),
                    }
                }
            }
        }
    }
}

/// Weights that are variables keep their values, in whatever order they are packed.
#[test]
fn variables_change_no_bit() {
    for (name, call) in calls() {
        let run = |variables| {
            let case = Case::new(&Device::Cpu, DType::F32, Layout::Contiguous, SMALL[2]);
            call(&case.with(variables)).unwrap_or_else(|e| panic!("{name}, {variables:?}: {e}"))
        };
        let want = run(Variables::None);
        for variables in [Variables::Inputs, Variables::Weights, Variables::Detached] {
            assert_close(name, &want, &run(variables), 0.);
        }
    }
}
