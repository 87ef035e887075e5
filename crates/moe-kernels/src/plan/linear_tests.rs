//! Tests of the choice among dense products.

use candle_core::DType;

use super::*;
use crate::scheme::{QuantGroup, QuantScheme};

/// The kernel of the qkv product of Qwen3-30B-A3B, norm included or not.
fn kernel<F: Form<Call = LinearCall>>(rows: usize, quant: Option<QuantWeights>) -> Option<String> {
    let call = LinearCall { rows, n: 5120, k: 2048, dtype: DType::BF16, quant, bias: false, aligned: true };
    let machine = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
    F::choose(&call, &machine).map(|form| form.kernel(&call))
}

#[test]
fn norms_leave_products_of_quantised_weights_before_streaming_ends() {
    let int4 = QuantScheme::int(4, QuantGroup::Size(128));
    let fp8 = QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 });
    for (scheme, scales) in [(int4, DType::F16), (fp8, DType::F32)] {
        let quant = Some(QuantWeights {
            scheme,
            scales,
            gate_up: false,
            in_blocks: false,
            order: ColumnOrder::Input,
        });
        for (rows, fused, alone) in [
            (1, "quant_linear_stream", "quant_linear_stream"),
            (4, "quant_linear_stream", "quant_linear_stream"),
            (5, "apart", "quant_linear_stream"),
            (8, "apart", "quant_linear_stream"),
            (9, "apart", "quant_linear_tensor"),
        ] {
            assert_eq!(kernel::<FusedLinearForm>(rows, quant).as_deref(), Some(fused), "{rows} rows");
            assert_eq!(kernel::<LinearForm>(rows, quant).as_deref(), Some(alone), "{rows} rows");
        }
    }
}

#[test]
fn products_of_sorted_columns_take_rows_in_their_order() {
    let scheme = QuantScheme::int(4, QuantGroup::Size(128)).with_act_order(true);
    let quant =
        |order| Some(QuantWeights { scheme, scales: DType::F16, gate_up: false, in_blocks: false, order });
    for (rows, name) in [
        (1, "order_rows + quant_linear_stream"),
        (8, "order_rows + quant_linear_stream"),
        (9, "order_rows + quant_linear_tensor"),
        (512, "order_rows + quant_dequantise + cublas"),
    ] {
        assert_eq!(
            kernel::<LinearForm>(rows, quant(ColumnOrder::Sorted)).as_deref(),
            Some(name),
            "{rows} rows"
        );
        // The norm inside the launch would leave rows in the order of x.
        assert_eq!(kernel::<FusedLinearForm>(rows, quant(ColumnOrder::Sorted)).as_deref(), Some("apart"));
    }
    for (rows, name) in [(1, "any_quant_linear"), (511, "any_quant_linear"), (512, "any_dequantise + cublas")]
    {
        assert_eq!(
            kernel::<LinearForm>(rows, quant(ColumnOrder::Filled)).as_deref(),
            Some(name),
            "{rows} rows"
        );
    }
}

#[test]
fn floats_stream_as_far_as_they_take_their_norm() {
    for (rows, fused, alone) in
        [(4, "linear_stream", "linear_stream"), (5, "apart", "linear_tensor"), (65, "apart", "cublas")]
    {
        assert_eq!(kernel::<FusedLinearForm>(rows, None).as_deref(), Some(fused), "{rows} rows");
        assert_eq!(kernel::<LinearForm>(rows, None).as_deref(), Some(alone), "{rows} rows");
    }
}

#[test]
fn products_of_many_rows_add() {
    for (form, rows, adds) in [
        (LinearForm::Blas, 512, true),
        (LinearForm::QuantBlas, 8191, true),
        (LinearForm::Blas, 511, false),
        (LinearForm::Tensor, 512, false),
        (LinearForm::Cpu, 512, false),
    ] {
        assert_eq!(form.adds(rows).is_ok(), adds, "{form:?}, {rows} rows");
    }
}
