//! Compares the bindings with the C headers of this machine: the size and the offsets of every
//! structure that is passed to C or read. Some of the bindings are written by hand.

use std::io::Write;
use std::mem::{offset_of, size_of};
use std::process::{Command, Stdio};

use super::ffi::*;

/// Expressions of C, and their values by the bindings.
type Claims = Vec<(String, usize)>;

macro_rules! claims {
    ($into:ident, $($name:ident { $($field:ident $(= $c:literal)?),* $(,)? })*) => {$(
        $into.push((format!("sizeof(struct {})", stringify!($name)), size_of::<$name>()));
        $(
            #[allow(unused_mut, unused_assignments, reason = "most names are the same in C")]
            let mut field = stringify!($field);
            $(field = $c;)?
            let claim = format!("offsetof(struct {}, {field})", stringify!($name));
            $into.push((claim, offset_of!($name, $field)));
        )*
    )*};
}

fn claims() -> Claims {
    let mut into = Claims::new();
    claims! {into,
        ibv_sge { addr, length, lkey }
        ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags,
            imm_data_invalidated_rkey_union = "imm_data", wr, qp_type,
            bind_mw_tso_union = "bind_mw",
        }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, qp_num, src_qp, wc_flags, pkey_index,
        }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_qp_attr { qp_state, qp_access_flags, cap, min_rnr_timer, timeout, retry_cnt }
        ibv_mr { context, pd, addr, length, lkey, rkey }
        ibv_comp_channel { context, fd }
        ibv_context { device, ops, abi_compat }
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        ibv_cq { context }
        ibv_qp { context, qp_num }
        ibv_device_attr {
            max_mr_size, max_qp_wr, max_cqe, max_qp_rd_atom, max_qp_init_rd_atom, atomic_cap,
        }
        ibv_port_attr { state, active_mtu, link_layer }
        rdma_event_channel { fd }
        rdma_cm_id { verbs, channel, context, qp, route, ps, port_num }
        rdma_route { addr, path_rec, num_paths }
        rdma_addr { src_addr_union = "src_addr", dst_addr_union = "dst_addr" }
        rdma_cm_event { id, listen_id, event, status, param }
        rdma_conn_param {
            private_data, private_data_len, responder_resources, initiator_depth, flow_control,
            retry_count, rnr_retry_count, srq, qp_num,
        }
    }
    let in_work = |field| offset_of!(ibv_send_wr, wr) + field;
    for (field, offset) in [
        ("rdma.remote_addr", offset_of!(rdma_t, remote_addr)),
        ("rdma.rkey", offset_of!(rdma_t, rkey)),
        ("atomic.remote_addr", offset_of!(atomic_t, remote_addr)),
        ("atomic.compare_add", offset_of!(atomic_t, compare_add)),
        ("atomic.swap", offset_of!(atomic_t, swap)),
        ("atomic.rkey", offset_of!(atomic_t, rkey)),
    ] {
        into.push((format!("offsetof(struct ibv_send_wr, wr.{field})"), in_work(offset)));
    }
    for (name, value) in [
        ("IBV_SEND_FENCE", ibv_send_flags::IBV_SEND_FENCE.0),
        ("IBV_SEND_SIGNALED", ibv_send_flags::IBV_SEND_SIGNALED.0),
        ("IBV_SEND_INLINE", ibv_send_flags::IBV_SEND_INLINE.0),
        ("IBV_WR_RDMA_WRITE", ibv_wr_opcode::IBV_WR_RDMA_WRITE),
        ("IBV_WR_RDMA_READ", ibv_wr_opcode::IBV_WR_RDMA_READ),
        ("IBV_WR_ATOMIC_CMP_AND_SWP", ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP),
        ("IBV_ACCESS_REMOTE_READ", ibv_access_flags::IBV_ACCESS_REMOTE_READ.0),
        ("IBV_ACCESS_REMOTE_ATOMIC", ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0),
        ("IBV_QP_ACCESS_FLAGS", ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0),
        ("IBV_QP_MIN_RNR_TIMER", ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0),
        ("IBV_WC_REM_ACCESS_ERR", ibv_wc_status::IBV_WC_REM_ACCESS_ERR),
        ("IBV_WC_RETRY_EXC_ERR", ibv_wc_status::IBV_WC_RETRY_EXC_ERR),
        ("RDMA_CM_EVENT_DISCONNECTED", rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED),
        ("RDMA_PS_TCP", rdma_port_space::RDMA_PS_TCP),
        ("RDMA_OPTION_ID", super::identifier::OPTION_LEVEL_ID as u32),
        ("RDMA_OPTION_ID_ACK_TIMEOUT", super::identifier::OPTION_ACK_TIMEOUT as u32),
    ] {
        into.push((name.to_owned(), value as usize));
    }
    into
}

#[test]
fn the_bindings_agree_with_the_headers_of_this_machine() {
    let claims = claims();
    let mut source = "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n\
                      #include <rdma/rdma_cma.h>\nint main(void) {\n"
        .to_owned();
    for (expression, _) in &claims {
        source.push_str(&format!("printf(\"%zu\\n\", (size_t)({expression}));\n"));
    }
    source.push_str("}\n");
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("structures");
    let compiler =
        Command::new("cc").args(["-x", "c", "-", "-o"]).arg(&program).stdin(Stdio::piped()).spawn();
    let Ok(mut compiler) = compiler else {
        println!("skipped: there is no cc");
        return;
    };
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    if !compiler.wait().unwrap().success() {
        println!("skipped: cc does not compile with the RDMA headers");
        return;
    }
    let printed = String::from_utf8(Command::new(program).output().unwrap().stdout).unwrap();
    let numbers: Vec<usize> = printed.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(numbers.len(), claims.len());
    for ((expression, claimed), is) in claims.iter().zip(numbers) {
        assert_eq!(*claimed, is, "{expression}");
    }
}
