// MPICH 4.0 over UCX hangs in MPI_Finalize where ranks are connected over TCP (UCX_TLS=tcp, or ^cma on one host, or
// several hosts). It closes its connections with ucp_disconnect_nb, which sends what is left and, over TCP, waits for
// the peer's answer; then it waits in PMI for the other ranks, and answers nobody any more. A rank that is a little
// later waits for its answer for ever.
//
// MPICH finds this function before UCX's, since this module has loaded MPICH. It does nothing and says that it is done:
// the connections then go with UCX's worker, after all ranks have met in PMI. Nothing is lost: MPI is ended after a
// barrier only (lifetime.cpp). A program that is linked with MPICH itself keeps UCX's.
#include <mpi.h>

#if defined(MPICH_VERSION)
extern "C" __attribute__((visibility("default"))) void* ucp_disconnect_nb(void* endpoint);
extern "C" __attribute__((visibility("default"))) void* ucp_disconnect_nb(void* /*endpoint*/) { return nullptr; }
#endif
