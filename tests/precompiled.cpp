// Its precompiled headers are what it is for.
int main() { return 0; }
