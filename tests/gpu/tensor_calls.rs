//! Every call on tensors on CUDA, as a user's program makes it: with candle's own device, in three dtypes, on
//! contiguous and other inputs, compared with the CPU's result for contiguous ones.
//!
//! Tolerances are relative to a result's largest magnitude: 1e-4 in f32, 4e-3 in f16, 3e-2 in bf16, which is some eight
//! roundings of the dtype. Integers must be equal.

use candle_core::{DType, Device, Tensor};
use moe_layer::{Activation, GatedMlp};
use moe_tests::tensor_calls::{Call, Case, LARGE, LAYOUTS, Layout, SMALL, Sizes, assert_close, calls};

use crate::common::{FLOATS, assert_error, small};

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-4,
        DType::F16 => 4e-3,
        _ => 3e-2,
    }
}

/// One call at these sizes, on the CPU and on the device in each layout.
fn check((name, call): (&str, Call), device: &Device, dtype: DType, sizes: Sizes, layouts: &[Layout]) {
    let run = |device: &Device, layout| {
        let what = format!("{name}, {dtype:?}, {layout:?}, {sizes:?} on {:?}", device.location());
        (call(&Case::new(device, dtype, layout, sizes)).unwrap_or_else(|e| panic!("{what}: {e}")), what)
    };
    let (want, _) = run(&Device::Cpu, Layout::Contiguous);
    for &layout in layouts {
        let (got, what) = run(device, layout);
        assert!(got.iter().all(|tensor| tensor.device().same_device(device)), "{what}: a result elsewhere");
        assert_close(&what, &want, &got, tolerance(dtype));
    }
}

#[test]
fn every_call_agrees_with_the_cpu() {
    let device = Device::new_cuda(0).unwrap();
    for call in calls() {
        for sizes in small(SMALL, 9, Sizes::rows) {
            for dtype in FLOATS {
                check(call, &device, dtype, sizes, &LAYOUTS);
            }
        }
    }
}

#[test]
fn so_do_those_with_fast_kernels() {
    let device = Device::new_cuda(0).unwrap();
    for call in calls() {
        for sizes in small(LARGE, 1, Sizes::rows) {
            check(call, &device, DType::BF16, sizes, &[Layout::Contiguous, Layout::Columns]);
        }
        check(call, &device, DType::F32, LARGE[0], &[Layout::Transposed]);
        check(call, &device, DType::F16, LARGE[0], &[Layout::Rows]);
    }
}

#[test]
fn a_device_with_a_stream_of_its_own_does_too() {
    let device = Device::new_cuda_with_stream(0).unwrap();
    for call in calls() {
        check(call, &device, DType::BF16, SMALL[2], &LAYOUTS);
    }
}

fn mlp(device: &Device, dtype: DType) -> GatedMlp {
    let case = Case::new(device, dtype, Layout::Contiguous, SMALL[0]);
    GatedMlp::new(
        case.weight(&[512, 256], 0.1).unwrap(),
        case.weight(&[256, 256], 0.1).unwrap(),
        Activation::SwiGlu,
    )
    .unwrap()
}

#[test]
fn threads_may_share_a_module() {
    let device = Device::new_cuda(0).unwrap();
    let cpu = mlp(&Device::Cpu, DType::BF16);
    let gpu = mlp(&device, DType::BF16);
    // candle's default device uses another stream in each thread, so the weights must be complete first.
    device.synchronize().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cpu = &cpu;
            let gpu = &gpu;
            let device = &device;
            scope.spawn(move || {
                for rows in 1..40 {
                    let numbers = (0..rows * 256).map(|i| ((i * 37 + thread * 101) % 97) as f32 / 48. - 1.);
                    let x = Tensor::from_vec(numbers.collect(), (rows, 256), &Device::Cpu).unwrap();
                    let x = x.to_dtype(DType::BF16).unwrap();
                    let want = cpu.forward(&x).unwrap();
                    let got = gpu.forward(&x.to_device(device).unwrap()).unwrap();
                    assert_close(
                        &format!("thread {thread}, {rows} rows"),
                        &[want],
                        &[got],
                        tolerance(DType::BF16),
                    );
                }
            });
        }
    });
}

#[test]
fn tensors_of_another_device_are_refused() {
    let device = Device::new_cuda(0).unwrap();
    let x = |device| Tensor::zeros((2, 256), DType::F32, device).unwrap();
    assert_error(mlp(&Device::Cpu, DType::F32).forward(&x(&device)), &["CUDA device 0"]);
    assert_error(mlp(&device, DType::F32).forward(&x(&Device::Cpu)), &["host memory"]);
}
